"""Parquet files written without pyarrow's row groups."""
