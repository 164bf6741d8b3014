"""How each code block of README and docs is tested: by page, and by the block's first line."""

from __future__ import annotations

from collections.abc import Mapping

from tests.docs.block_kinds import Drawn, Kind, Parsed, Ran, RanBy

_LONG = Parsed("takes minutes, or needs the network; CI runs the scripts that it needs")
_DOCKER = Parsed("needs a Docker daemon; tests/docker runs the entry points and the broker")
_ADDRESSES = Parsed("has addresses of three machines; tests/server runs these commands on loopback")
_OPTIONS = Parsed("leaves options out")
_MEMBERS = Parsed("needs four controllers; tests/server changes the voters by these commands")
_SPARK = Parsed("needs a cluster of Spark; tests/reconcile runs the job and the sources")
_FAR_BUCKET = Parsed("has a bucket of S3; tests/backup runs these commands on one of its own")
_JAVA = RanBy("tests/docs/test_code_blocks.py::test_java_blocks_are_parts_of_the_examples")
_GO_PAGE = "tests/clients/test_client_scenarios.py::test_the_lines_of_the_page_on_go_run"
_PLUG_IN = Drawn("settings of a broker, which the tests of its plug-in use")
_OUTPUT = Drawn("output")

TABLE: Mapping[str, Mapping[str, Kind]] = {
    # First, as the shared cluster is the one that it starts.
    "docs/quickstart.md": {
        "./scripts/setup": Ran(skipped=("./scripts/setup",)),
        "export STREAMMETA_CONNECT": Ran(),
        "import asyncio": Ran(),
        ".venv/bin/python first.py": Ran(),
    },
    "README.md": {
        "brokers ──── gRPC": Drawn("a diagram"),
        "./scripts/demo ": _LONG,
        "1.0 s  336,776": _OUTPUT,
        "11.4 s  broker 1": _OUTPUT,
        ".venv/bin/streammeta dev": Ran(),
        "import asyncio": RanBy(
            "tests/broker_client/test_stream_client.py::test_the_lines_of_the_readme_run"
        ),
    },
    "CONTRIBUTING.md": {
        "./scripts/setup": _LONG,
        "./scripts/test tests/metadata": _LONG,
        "ELECTION = ": Drawn("a mutant, which test_mutant_files.py reads"),
        "./scripts/test tests/mutants": _LONG,
        "./scripts/generate_docs": _LONG,
        "./scripts/prose": _LONG,
        "git config": Parsed("changes the settings of this clone"),
        "./scripts/release": _LONG,
    },
    "docker/README.md": {
        "docker compose -f docker/compose.yaml up --build": _DOCKER,
        "docker compose -f docker/compose.yaml up --wait compactor": _DOCKER,
        "docker compose -f docker/compose.yaml kill": _DOCKER,
        "docker build": _DOCKER,
    },
    "docs/architecture.md": {"flowchart": Drawn("a diagram, which test_docs_site.py draws")},
    "docs/benchmarks.md": {"./scripts/bench failover": _LONG},
    "docs/plugins/kafka.md": {
        "./scripts/java --skip-tests": _LONG,
        "./scripts/setup": _LONG,
        "mkdir -p /tmp/kafka": _LONG,
        "export CLASSPATH": _LONG,
        "export CLASSPATH (2)": _LONG,
        "./scripts/java -pl": _LONG,
    },
    "docs/broker-client.md": {
        "mkdir -p": Ran("own"),
        "python docker/broker_example.py": Ran("own"),
        'async with StreamClient.open( ["127.0.0.1:9091"]': Ran(setting="client"),
        "async with StreamClient.open(endpoints, bucket, node_id=7) as client: stream": Ran(
            setting="client"
        ),
        "async with StreamClient.open(endpoints, bucket, node_id=7) as client: ids": Ran(
            setting="client"
        ),
        "async with StreamClient.open(endpoints, bucket, node_id=7) as client: shared": RanBy(
            "tests/broker_client/test_shared_streams.py::test_the_example_of_the_page_runs"
        ),
        "async with StreamClient.open(endpoints, bucket, node_id=7) as client: version": Ran(
            setting="client"
        ),
        "async with ( StreamClient.open(": Ran(setting="client"),
        "from streammeta.client import sync": Ran(setting="client"),
        "tls = TlsFiles": Parsed("needs certificates; tests/trust connects so"),
        'config = StreamClientConfig(wal_directory="': Ran(setting="client"),
        "config = StreamClientConfig(object_log": Ran(setting="client"),
    },
    "docs/brokers.md": {
        "async with StreamClient.open(endpoints, bucket, node_id=7) as client: tags": Ran(
            setting="partition"
        ),
        "async with StreamClient.open(endpoints, bucket, node_id=7) as client: store": Ran(
            setting="queue"
        ),
        "config = StoreConfig(backend=Backend.CHUNKS": Parsed(
            "has a bucket of S3; tests/brokers opens such stores over one of its own"
        ),
        "await store.set_reserve_time": Ran(setting="queue store"),
        "key = OwnerKey": Ran(setting="ledgers"),
        "policies = PolicyStore": Ran(setting="policies"),
        "segment = StreamingSegment": Ran(setting="segments"),
        "from streammeta.client import StreamClient": RanBy(
            "tests/brokers/test_brokers_page.py::test_journals_keep_what_they_promise"
        ),
        "async with StreamClient.open(endpoints, bucket, node_id=7) as client: journals": (
            RanBy("tests/brokers/test_brokers_page.py::test_the_example_runs_as_it_is_printed")
        ),
    },
    "docs/compaction.md": {
        "import asyncio": Ran(setting="compaction"),
        "streammeta compact plan": Ran(setting="uploads"),
        "node_ids: ": _OUTPUT,
        "streammeta compact --connect": Ran(setting="uploads"),
    },
    "docs/format.md": {
        "<reversed hex>": Drawn("a key"),
        "data blocks |": Drawn("a layout of bytes"),
        "header (40 bytes)": Drawn("a layout of bytes"),
    },
    "docs/go.md": {
        "go mod edit": RanBy(_GO_PAGE),
        "client, err := streammeta.Dial": RanBy(_GO_PAGE),
    },
    "docs/installation.md": {"an s3:// address needs": _OUTPUT},
    "docs/java.md": {
        "./scripts/chaos --plugin": _LONG,
        "./scripts/java --skip-tests": _LONG,
        "try (StreammetaClient client": _JAVA,
        "StreammetaClient client = ": _JAVA,
    },
    "docs/kafka.md": {
        "streammeta dev": Ran("kafka"),
        "streammeta kafka-user": _OPTIONS,
        "streammeta kafka --shared": _OPTIONS,
    },
    "docs/operations/backup-and-restore.md": {
        "streammeta controller ... --backup-store": _FAR_BUCKET,
        "streammeta restore plan": Parsed("needs a lost cluster; tests/backup restores one"),
    },
    "docs/operations/monitor.md": {
        "streammeta quorum describe": Ran(),
        "streammeta controller ... --http-listen": _OPTIONS,
        "scrape_configs:": Parsed("is a file of settings of Prometheus"),
        "streammeta check perf": Parsed("writes for 40 s; tests/cli runs it for less"),
        "streammeta cluster hash": Ran(),
        "streammeta snapshot export": Ran(),
        'streammeta shell --connect "$CONNECT"': Parsed("names files; tests/shell runs all of it"),
    },
    "docs/operations/reconcile.md": {
        "streammeta reconcile plan": Ran(),
        "frame.select": _SPARK,
        "spark-submit": _SPARK,
    },
    "docs/operations/repair.md": {
        'streammeta quorum remove-voter --connect "$CONNECT" --node-id 3': _MEMBERS,
        'streammeta storage format --data-dir "$DATA" --cluster-id demo --node-id 3 --join': (
            _MEMBERS
        ),
        "streammeta controller --node-id 3 --cluster-id demo": _MEMBERS,
        "streammeta quorum describe": _MEMBERS,
        "streammeta quorum add-voter": _MEMBERS,
        "streammeta recover": Parsed("needs lost disks; tests/recover runs these commands"),
        "streammeta node list": Ran(),
    },
    "docs/operations/run.md": {
        'streammeta storage format --data-dir "$DATA" --cluster-id demo --node-id 3 --voters': (
            _ADDRESSES
        ),
        "streammeta controller --node-id 3 --cluster-id demo": _ADDRESSES,
        "useradd": Parsed("makes a user of the system; tests/deploy starts the unit's commands"),
        "kubectl create": Parsed("needs a cluster of Kubernetes; tests/deploy renders the chart"),
        'default = "prod"': Parsed("is a file of settings; tests/cli reads such profiles"),
        'streammeta storage format --data-dir "$DATA" --cluster-id demo --node-id 4': _MEMBERS,
        'streammeta quorum remove-voter --connect "$CONNECT" --node-id 4': _MEMBERS,
        "streammeta controller --node-id 3 --cluster-id demo (2)": _ADDRESSES,
    },
    "docs/operations/secure.md": {
        "streammeta certs ca": Ran(),
        "streammeta controller ... --tls-ca /etc": _OPTIONS,
        "[principals]": Parsed("is a file of settings; tests/trust reads such policies"),
        "streammeta controller ... --tls-ca ...": _OPTIONS,
    },
    "docs/plugins/rocketmq.md": {
        "mkdir -p /tmp/rocketmq": _LONG,
        "jar=": _LONG,
        "admin=": _LONG,
    },
    "docs/plugins/pulsar.md": {
        "mkdir -p /tmp/pulsar": _LONG,
        "export CLASSPATH": _LONG,
        "cat > /tmp/pulsar/write.py": _LONG,
        "cat > /tmp/pulsar/read.py": _LONG,
    },
    "docs/plugins/automq.md": {
        "./scripts/setup": _PLUG_IN,
        "git clone": _PLUG_IN,
        "elasticstream.endpoint=": _PLUG_IN,
        "elasticstream.endpoint= (2)": _PLUG_IN,
    },
    "docs/protocol.md": {
        '{"loadBalancingConfig"': RanBy(
            "tests/server/test_server_failover.py::test_a_stock_client_reaches_the_leader_by_its_health"
        ),
    },
    "docs/reconciliation.md": {
        "streammeta reconcile watch": Parsed("runs until it is stopped; tests/reconcile runs it"),
        "{": Parsed("is a policy of S3; tests/reconcile compares it with the calls that are made"),
        "from streammeta.reconcile import apply, plan": _SPARK,
        "from streammeta.reconcile import register": _SPARK,
        "PYSPARK_PYTHON": _SPARK,
        "15 3 * * *": Parsed("is a line of cron"),
        "from airflow": Parsed("needs Airflow"),
    },
    "docs/security.md": {"streammeta audit verify": Parsed("needs an audit log; tests/trust has")},
    "docs/track-record.md": {
        "./scripts/mutants": _LONG,
        "caught  vote": _OUTPUT,
        ".venv/bin/python -m tests.linearizability.check": Parsed("needs a recorded history"),
    },
}
"""By page, the blocks in the order in which they run.

A key is how a block begins, white space as one blank. Of blocks that begin alike the second one's
key ends with (2), and so on.
"""
