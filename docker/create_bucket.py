"""Creates a bucket if it does not exist: the one-shot that the controllers of compose.yaml await.

Credentials come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.
"""

import argparse

import boto3
from botocore.config import Config


def main() -> None:
    """Reads the command line and makes the bucket."""
    parser = argparse.ArgumentParser(
        description="Create a bucket unless it exists.",
        epilog="example: python create_bucket.py --endpoint http://127.0.0.1:4566 --bucket streams",
    )
    parser.add_argument("--endpoint", required=True, help="URL of the S3 endpoint")
    parser.add_argument("--bucket", required=True, help="name of the bucket")
    arguments = parser.parse_args()

    client = boto3.client(
        "s3",
        endpoint_url=arguments.endpoint,
        region_name="us-east-1",
        config=Config(s3={"addressing_style": "path"}),
    )
    try:
        client.create_bucket(Bucket=arguments.bucket)
        print(f"created bucket {arguments.bucket}")
    except (
        client.exceptions.BucketAlreadyOwnedByYou,
        client.exceptions.BucketAlreadyExists,
    ):
        print(f"bucket {arguments.bucket} exists")


if __name__ == "__main__":
    main()
