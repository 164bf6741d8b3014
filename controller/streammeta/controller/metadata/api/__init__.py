"""Requests to the metadata and their answers: values, validation, sizes."""
