"""Mutants of copies inside a bucket, of the digests of requests, and of objects that fail alone."""

from tests.mutants.mutant import Mutant, Tested

_COPIES = "tests/storage/test_storage_s3_copies.py"
_DELETION = "tests/reconcile/test_reconcile_deletion.py"

COPIES = (
    Mutant(
        "digest-switched-by-another-thread",
        "Tags of all objects but the first are refused for good by an older server.",
        "a shared flag that is read after the request which it was to describe",
        """
        streammeta.storage.object_store.s3.s3:
        - if was_md5:
        + if digests.are_md5:
              raise
        """,
        Tested(f"{_COPIES}::test_a_request_repeats_with_md5_though_another_thread_found_out_first"),
    ),
    Mutant(
        "no-tags-taken-for-no-object",
        "An orphan without tags counts as gone, and no rule of the bucket deletes it.",
        "NoSuchTagSet, which some servers answer with 404",
        """
        streammeta.storage.object_store.s3.s3_copies:
        - if error.response.get("Error", {}).get("Code") not in _NO_TAGS:
        + if True:
              raise
        """,
        Tested(
            f"{_COPIES}::test_an_object_without_tags_is_tagged_where_the_server_answers_404_for_it"
        ),
    ),
    Mutant(
        "large-object-in-one-request",
        "An object above 5 GiB can never be moved to quarantine or brought back.",
        "CopyObject, which copies 5 GiB at most",
        """
        streammeta.storage.object_store.s3.s3:
        - if found.size <= COPIED_AT_ONCE:
        + if True:
              try:
        """,
        Tested(f"{_COPIES}::test_a_large_object_is_copied_by_parts_with_all_that_it_has"),
    ),
    Mutant(
        "copy-without-its-fields",
        "A copy by parts loses the user metadata and the headers of the object.",
        "uploads in parts, which keep nothing of a source",
        """
        streammeta.storage.object_store.s3.s3_copies:
        - upload = store.start_upload(target_key, fields, tags)
        + upload = store.start_upload(target_key, {}, tags)
        """,
        Tested(f"{_COPIES}::test_a_large_object_is_copied_by_parts_with_all_that_it_has"),
    ),
    Mutant(
        "any-object-under-the-key-is-copied",
        "An object that was replaced is copied as if it were the one of the plan.",
        "copies by key alone",
        """
        streammeta.storage.object_store.s3.s3:
        - return source | ({"CopySourceIfMatch": f'"{etag}"'} if etag else {})
        + return source
        """,
        Tested(f"{_COPIES}::test_another_object_than_the_one_that_is_meant_is_not_copied"),
    ),
    Mutant(
        "parts-of-two-objects",
        "An object that is replaced during a copy gives a copy of parts of both.",
        "servers that ignore x-amz-copy-source-if-match",
        """
        streammeta.storage.object_store.s3.s3_copies:
        - if store.head(source_key).etag != source.etag:
        + if False:
              raise ObjectChangedError(source_key)
        """,
        Tested(f"{_COPIES}::test_an_object_that_is_replaced_between_two_parts_is_not_copied"),
    ),
    Mutant(
        "parts-of-a-failed-copy-left",
        "The parts of a copy that failed stay in the bucket, where no listing shows them.",
        "multipart uploads that nobody aborts",
        """
        streammeta.storage.object_store.s3.s3_copies:
        - with suppress(StorageError):
        -     store.abort_multipart(upload)
          raise
        """,
        Tested(f"{_COPIES}::test_a_copy_that_fails_leaves_nothing_and_may_be_repeated"),
    ),
    Mutant(
        "older-digest-not-sent",
        "Nothing can be deleted in a bucket of an older server.",
        "DeleteObjects without Content-MD5, refused with MissingContentMD5",
        """
        streammeta.storage.object_store.s3.s3_client:
        - if self.are_md5:
        + if False:
              digest = hashlib.md5(params["body"], usedforsecurity=False).digest()
        """,
        Tested(f"{_COPIES}::test_a_server_that_wants_md5_gets_it"),
    ),
    Mutant(
        "object-failures-end-a-task",
        "Twenty objects that can't be copied hold back the deletion of all others.",
        "failures of one object that count as failures of the store",
        """
        streammeta.reconcile.deletion.tasks:
        - self._failed_in_a_row += sum(result.may_concern_all for result in judged)
        + self._failed_in_a_row += len(judged)
        """,
        Tested(f"{_DELETION}::test_objects_that_fail_by_themselves_end_no_task"),
    ),
    Mutant(
        "replaced-object-quarantined",
        "An object that was put by hand since the look at it is moved to quarantine and deleted.",
        "a look before and a copy after, of whatever is there then",
        """
        streammeta.reconcile.deletion.tasks:
        - self._store.copy(key, place, expected)
        + self._store.copy(key, place)
        """,
        Tested(f"{_DELETION}::test_an_object_that_is_replaced_before_its_copy_is_kept"),
    ),
)
