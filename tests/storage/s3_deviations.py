"""What S3 servers are known to do otherwise than the contract of stores says.

A test named here is expected to fail on that server, and only there: it is run all the same, and
fails when the server has been mended.
"""

from __future__ import annotations

DEVIATIONS = {
    ("moto", "test_an_upload_that_ended_is_unknown"): (
        "answers 500 to requests about an upload that it has forgotten"
    ),
    ("moto", "test_copying_a_part_from_behind_the_end_is_an_error"): (
        "copies what there is of the range"
    ),
    ("moto", "test_damaged_bytes_are_refused[md5]"): "does not look at Content-MD5",
    ("moto", "test_damaged_bytes_are_refused[crc32]"): "does not look at x-amz-checksum-crc32",
    ("moto", "test_damaged_bytes_are_refused[crc32c]"): "does not look at x-amz-checksum-crc32c",
    ("ministack", "test_tags_go_with_the_object_that_had_them"): (
        "keeps the tags when an object is replaced by one without"
    ),
    ("ministack", "test_tags_are_kept_with_an_object_of_parts"): (
        "drops the tags that an upload in parts is begun with"
    ),
    ("ministack", "test_damaged_bytes_are_refused[crc32c]"): "refuses CRC32C altogether",
    ("ministack", "test_stored_checksums_go_along_with_every_way_to_make_an_object[crc32c]"): (
        "refuses CRC32C altogether"
    ),
    ("ceph", "test_an_upload_that_ended_is_unknown"): (
        "answers 500 to the completion of an upload that was aborted"
    ),
    ("ceph", "test_tags_are_kept_with_an_object_of_parts"): (
        "drops the tags that an upload in parts is begun with"
    ),
    ("ceph", "test_damaged_bytes_are_refused[crc32]"): "does not look at x-amz-checksum-crc32",
    ("ceph", "test_damaged_bytes_are_refused[crc32c]"): "does not look at x-amz-checksum-crc32c",
}
"""(server, test without the server in its name): what the server does."""
