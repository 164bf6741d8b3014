"""KVService's messages, from protobuf to requests of the map and back."""

from streammeta.controller.metadata import answers, requests
from streammeta.controller.rpc.convert import error_out, page_request
from streammeta.v1 import kv_pb2 as pb


def put_kvs_in(message: pb.PutKVsRequest) -> requests.PutKVs:
    """Read PutKVs."""
    return requests.PutKVs(
        request_id=message.request_id,
        items=tuple(
            requests.KVToPut(
                namespace=item.namespace,
                key=item.key,
                value=item.value,
                overwrite=item.overwrite,
                expected_version=(
                    item.expected_version if item.HasField("expected_version") else None
                ),
            )
            for item in message.items
        ),
    )


def put_kvs_out(answer: answers.KVResultsAnswer) -> pb.PutKVsResponse:
    """Write the answer to PutKVs."""
    return pb.PutKVsResponse(results=_results(answer))


def get_kvs_in(message: pb.GetKVsRequest) -> requests.GetKVs:
    """Read GetKVs."""
    return requests.GetKVs(keys=tuple(_key(key) for key in message.keys))


def get_kvs_out(answer: answers.KVResultsAnswer) -> pb.GetKVsResponse:
    """Write the answer to GetKVs."""
    return pb.GetKVsResponse(results=_results(answer))


def delete_kvs_in(message: pb.DeleteKVsRequest) -> requests.DeleteKVs:
    """Read DeleteKVs."""
    return requests.DeleteKVs(
        request_id=message.request_id, keys=tuple(_key(key) for key in message.keys)
    )


def delete_kvs_out(answer: answers.KVResultsAnswer) -> pb.DeleteKVsResponse:
    """Write the answer to DeleteKVs."""
    return pb.DeleteKVsResponse(results=_results(answer))


def list_kvs_in(message: pb.ListKVsRequest) -> requests.ListKVs:
    """Read ListKVs."""
    return requests.ListKVs(
        namespace=message.namespace,
        prefix=message.prefix,
        keys_only=message.keys_only,
        namespaces=message.namespaces,
        page=page_request(message.page),
    )


def list_kvs_out(answer: answers.ListKVsAnswer) -> pb.ListKVsResponse:
    """Write the answer to ListKVs."""
    return pb.ListKVsResponse(
        entries=[
            pb.KVEntry(key=entry.key, value=entry.value, version=entry.version)
            for entry in answer.entries
        ],
        next_page_token=answer.next_page_token,
        namespace_names=answer.namespace_names,
    )


def _key(message: pb.KVKey) -> requests.KVKey:
    return requests.KVKey(
        namespace=message.namespace,
        key=message.key,
        expected_version=(
            message.expected_version if message.HasField("expected_version") else None
        ),
    )


def _results(answer: answers.KVResultsAnswer) -> list[pb.KVResult]:
    return [
        pb.KVResult(
            error=error_out(result.error),
            value=result.value,
            version=result.version,
            found=result.found,
        )
        for result in answer.results
    ]
