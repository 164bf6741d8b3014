"""Rights in the bucket: those of the page are enough, each is needed, and one that lacks is named.

moto judges requests by policies of IAM. It takes deletions of many keys for one of the bucket, so
that the bucket's own name is added to what may be deleted; and it does not ask for the right to
read the source of a copy, or its tags, which are left out where rights are taken away.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import boto3
import pytest

from streammeta.reconcile.apply import ApplyConfig, ApplyResult, apply
from streammeta.reconcile.deletion.order import Outcome
from streammeta.reconcile.engines.engine import EngineName
from streammeta.reconcile.plan import PlanConfig, plan
from streammeta.reconcile.plans.plan_folder import PlanResult
from streammeta.reconcile.undo import UndoResult, undo
from streammeta.storage.errors import AccessDeniedError
from streammeta.storage.object_store.opening import open_object_store
from streammeta.storage.object_store.protocol.address import StoreAddress
from streammeta.storage.object_store.protocol.base import ObjectStore
from tests.reconcile.fake_controller import COMMITTED, OWN, FakeMap, MapObject, own
from tests.storage.s3_servers import S3Endpoint, running_moto

PAGE = Path(__file__).parents[2] / "docs" / "reconciliation.md"
BUCKET = "data"
ORPHANS = tuple(own(object_id) for object_id in (1, 2, 3))
LIVE = own(10)

Statements = dict[str, dict[str, Any]]


def statements() -> Statements:
    """The statements of the page's policy, by name."""
    (block,) = re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.S)
    text = block.replace("BUCKET", BUCKET).replace("NAMESPACE", OWN)
    return {statement["Sid"]: statement for statement in json.loads(text)["Statement"]}


def of_command(name: str) -> Statements:
    """The statements that the page's table gives a command."""
    (row,) = re.findall(rf"^\| `{re.escape(name)}` \| (.*) \|$", PAGE.read_text(), re.M)
    named = re.findall(r"`(\w+)`", row)
    return {sid: statement for sid, statement in statements().items() if sid.rstrip("2") in named}


def without(given: Statements, right: str) -> Statements:
    """The statements, without a right wherever they give it."""
    found: Statements = {}
    for sid, one in given.items():
        actions = [one["Action"]] if isinstance(one["Action"], str) else one["Action"]
        if left := [action for action in actions if action != right]:
            found[sid] = one | {"Action": left}
    return found


@dataclass
class Server:
    """A server that enforces policies, and a bucket with orphans."""

    endpoint: S3Endpoint
    connect: str
    folder: Path
    admin: S3Endpoint
    users: int = 0
    plans: int = 0

    def iam(self) -> Any:
        return boto3.client(
            "iam",
            endpoint_url=self.endpoint.url,
            region_name="us-east-1",
            aws_access_key_id=self.admin.access_key,
            aws_secret_access_key=self.admin.secret_key,
        )

    def user(self, given: Mapping[str, Any]) -> str:
        """Make a user with these statements alone; gives the bucket's address for it."""
        self.users += 1
        name, iam = f"user-{self.users}", self.iam()
        allowed = list(given.values())
        if any("s3:DeleteObject" in statement["Action"] for statement in allowed):
            bucket = f"arn:aws:s3:::{BUCKET}"
            allowed.append({"Effect": "Allow", "Action": "s3:DeleteObject", "Resource": bucket})
        document = {"Version": "2012-10-17", "Statement": allowed}
        iam.create_user(UserName=name)
        iam.put_user_policy(UserName=name, PolicyName="p", PolicyDocument=json.dumps(document))
        key = iam.create_access_key(UserName=name)["AccessKey"]
        given_key = replace(
            self.endpoint, access_key=key["AccessKeyId"], secret_key=key["SecretAccessKey"]
        )
        return given_key.uri(BUCKET)

    def plan(self, store: str, **changes: Any) -> PlanResult:
        self.plans += 1
        made = PlanConfig(
            store=StoreAddress.parse(store),
            connect=(self.connect,),
            folder=self.folder / f"plan-{self.plans}",
            grace_ms=0,
            unsafe_grace=True,
            max_share=1,
            engine=EngineName.LOCAL,
        )
        return plan(replace(made, **changes))

    def planned(self) -> Path:
        """A plan of a user that may plan."""
        self.plan(self.user(of_command("plan")))
        return self.folder / f"plan-{self.plans}"

    def bucket(self) -> ObjectStore:
        return open_object_store(self.admin.uri(BUCKET))

    def forget_runs(self) -> None:
        """Delete the leases of runs that had no right to do so."""
        with closing(self.bucket()) as store:
            left = [info.key for info in store.list_objects() if "/leases/" in info.key]
            store.delete_many(left)

    def objects(self) -> dict[str, tuple[bytes, dict[str, str]]]:
        """Bytes and tags of all keys but the lease's."""
        client = boto3.client(
            "s3",
            endpoint_url=self.endpoint.url,
            region_name="us-east-1",
            aws_access_key_id=self.admin.access_key,
            aws_secret_access_key=self.admin.secret_key,
        )
        with closing(self.bucket()) as store:
            keys = [info.key for info in store.list_objects() if "/leases/" not in info.key]
            return {
                key: (
                    store.get_range(key),
                    {
                        tag["Key"]: tag["Value"]
                        for tag in client.get_object_tagging(Bucket=BUCKET, Key=key)["TagSet"]
                    },
                )
                for key in keys
            }


@pytest.fixture
def server(state: FakeMap, endpoint: str, tmp_path: Path) -> Iterator[Server]:
    state.objects = {10: MapObject(COMMITTED, size=4)}
    with running_moto() as moto:
        moto.create_bucket(BUCKET)
        made = Server(moto, endpoint, tmp_path, moto)
        all_of_it = {"Effect": "Allow", "Action": ["s3:*", "iam:*"], "Resource": "*"}
        iam = made.iam()
        iam.create_user(UserName="admin")
        policy = json.dumps({"Version": "2012-10-17", "Statement": [all_of_it]})
        iam.put_user_policy(UserName="admin", PolicyName="p", PolicyDocument=policy)
        key = iam.create_access_key(UserName="admin")["AccessKey"]
        made.admin = replace(moto, access_key=key["AccessKeyId"], secret_key=key["SecretAccessKey"])
        enforce(moto, "0")
        with closing(made.bucket()) as store:
            state.mark(store)
            for number, orphan in enumerate(ORPHANS):
                store.put(orphan, b"orphan %d" % number)
            store.put(LIVE, b"live")
        yield made
        enforce(moto, "inf")
        _tell(moto, "reset")  # what it has outlives it, in this process


def enforce(moto: S3Endpoint, after: str) -> None:
    """Have moto judge all requests but the first `after`."""
    _tell(moto, "reset-auth", after)


def _tell(moto: S3Endpoint, what: str, body: str = "") -> None:
    as_text = {"Content-Type": "text/plain"}
    url = f"{moto.url}/moto-api/{what}"
    with urllib.request.urlopen(urllib.request.Request(url, body.encode(), as_text)):
        pass


def run_apply(server: Server, folder: Path, store: str, **how: Any) -> ApplyResult:
    return apply(
        ApplyConfig(folder, store=StoreAddress.parse(store), engine=EngineName.LOCAL, **how)
    )


WAYS: dict[str, tuple[dict[str, Any], Outcome]] = {
    "apply --yes": ({"delete": True}, Outcome.DELETED),
    "apply --yes --quarantine": ({"delete": True, "quarantine": True}, Outcome.QUARANTINED),
    "apply --yes --tag": ({"delete": True, "tag": True}, Outcome.TAGGED),
}


def test_the_rights_of_the_page_are_enough(server: Server) -> None:
    planned = server.plan(server.user(of_command("plan")), deep_share=1.0)
    assert (planned.candidates.keys, planned.unknown) == (len(ORPHANS), ())
    versions = server.plan(server.user(of_command("plan --versions")), versions=True)
    assert versions.unknown == ()

    dry = run_apply(server, server.planned(), server.user(of_command("plan")))
    assert dry.outcomes[Outcome.WOULD_DELETE].keys == len(ORPHANS)
    before = server.objects()

    tagged = run_apply(
        server,
        server.planned(),
        server.user(of_command("apply --yes --tag")),
        delete=True,
        tag=True,
    )
    assert tagged.outcomes[Outcome.TAGGED].keys == len(ORPHANS)
    with_tags = server.objects()
    assert with_tags.keys() == before.keys()
    assert {key for key, (_, tags) in with_tags.items() if tags} == set(ORPHANS)

    folder = server.planned()
    store = server.user(of_command("apply --yes --quarantine"))
    moved = run_apply(server, folder, store, delete=True, quarantine=True)
    assert moved.outcomes[Outcome.QUARANTINED].keys == len(ORPHANS)
    assert not set(ORPHANS) & server.objects().keys()
    back = undo(folder, StoreAddress.parse(server.user(of_command("undo"))))
    assert back.complete
    assert server.objects() == with_tags, "byte for byte, and tag for tag"

    gone = run_apply(server, server.planned(), server.user(of_command("apply --yes")), delete=True)
    assert gone.outcomes[Outcome.DELETED].keys == len(ORPHANS)
    assert server.objects().keys() == before.keys() - set(ORPHANS)


NEEDED = {
    "plan": ("s3:ListBucket", "s3:GetObject"),
    "apply --yes": ("s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:DeleteObject"),
    "apply --yes --quarantine": (
        *("s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:DeleteObject"),
    ),
    "apply --yes --tag": (
        *("s3:ListBucket", "s3:GetObject", "s3:PutObject"),
        *("s3:GetObjectTagging", "s3:PutObjectTagging"),
    ),
    "undo": ("s3:ListBucket", "s3:GetObject", "s3:PutObject"),
}


@pytest.mark.parametrize("command", NEEDED)
def test_a_right_that_lacks_is_named_and_nothing_is_changed(server: Server, command: str) -> None:
    folder = server.planned()
    if command == "undo":
        moved = run_apply(server, folder, server.admin.uri(BUCKET), delete=True, quarantine=True)
        assert moved.complete
    before = server.objects()

    for right in NEEDED[command]:
        store = server.user(without(of_command(command), right))
        said = _said_by(server, command, folder, store)
        assert right in said, said
        after = server.objects()
        if command != "undo":
            copies = f"{OWN}/quarantine/"
            after = {key: value for key, value in after.items() if not key.startswith(copies)}
        assert after == before, right
        server.forget_runs()


def _said_by(server: Server, command: str, folder: Path, store: str) -> str:
    """What a command says that lacks a right."""
    work: dict[str, Callable[[], object]] = {
        "plan": lambda: server.plan(store),
        "undo": lambda: undo(folder, StoreAddress.parse(store)),
    }
    how, done = WAYS.get(command, ({}, None))
    try:
        result = work.get(command, lambda: run_apply(server, folder, store, **how))()
    except AccessDeniedError as error:
        return str(error)
    assert isinstance(result, ApplyResult | UndoResult)
    assert not result.complete
    assert done is None or done not in result.outcomes
    return "; ".join(result.problems)


@pytest.mark.parametrize(
    ("right", "command", "options"),
    [
        ("s3:ListBucketMultipartUploads", "plan", {}),
        ("s3:ListBucketVersions", "plan --versions", {"versions": True}),
    ],
)
def test_a_plan_says_what_it_had_no_right_to_find_out(
    server: Server, right: str, command: str, options: dict[str, Any]
) -> None:
    made = server.plan(server.user(without(of_command(command), right)), **options)
    (said,) = made.unknown
    assert right in said
    assert (made.candidates.keys, made.failed_guards) == (len(ORPHANS), ())


def test_a_key_that_may_not_be_deleted_is_named_with_the_right(server: Server) -> None:
    given = of_command("apply --yes")
    del given["Delete"]
    folder = server.planned()
    store = server.user(
        {sid: statement for sid, statement in given.items() if sid != "Lease"}
        | {"Lease": given["Lease"] | {"Action": ["s3:PutObject"]}}
    )
    result = run_apply(server, folder, store, delete=True)
    assert result.outcomes[Outcome.FAILED].keys == len(ORPHANS)
    assert any("s3:DeleteObject" in problem for problem in result.problems)
    assert set(ORPHANS) <= server.objects().keys()
