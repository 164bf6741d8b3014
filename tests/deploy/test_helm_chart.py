"""The chart renders to objects that Kubernetes takes, and that keep a quorum alive.

No Kubernetes runs here: Helm renders, the published schemas judge strictly, and every command line
is parsed by the command it is for.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml

from streammeta.cli.root import cli

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/streammeta"
HELM = Path(sys.executable).parent / "helm"
VERSIONS = ("1.33", "1.37")
"""Kubernetes' releases whose schemas judge."""

OPERATOR = "monitoring.coreos.com/"
"""Kinds of the Prometheus operator, whose schemas are not Kubernetes' own."""

NEEDED = {"clusterId": "demo", "store": "s3://bucket?region=eu-central-1"}
SETS: dict[str, dict[str, str]] = {
    "tls": {"tls.secret": "certs", "storeSecret": "keys", "backupStore": "s3://copies"},
    "plain": {"insecure": "true"},
    "one": {"insecure": "true", "replicas": "1", "antiAffinity": "preferred"},
    "five": {"tls.secret": "certs", "replicas": "5", "options.log-level": "debug"},
    "placed": {
        "tls.secret": "certs",
        "storage.className": "fast",
        "nodeSelector.disk": "ssd",
        "tolerations[0].operator": "Exists",
        "podAnnotations.team": "storage",
        "image.pullSecrets[0]": "registry",
    },
    "watched": {
        "tls.secret": "certs",
        "serviceAccount.annotations.eks\\.amazonaws\\.com/role-arn": "arn:aws:iam::1:role/a",
        "podLabels.identity": "yes",
        "serviceMonitor.enabled": "true",
        "serviceMonitor.labels.release": "prometheus",
        "prometheusRule.enabled": "true",
        "prometheusRule.runbookBase": "https://docs.example.org/",
    },
}


def helm(*words: str | Path, values: dict[str, str]) -> subprocess.CompletedProcess[str]:
    given = [f"{name}={value}" for name, value in {**NEEDED, **values}.items()]
    flags = [word for setting in given for word in ("--set", setting)]
    return subprocess.run(
        [HELM, *words, CHART, *flags], capture_output=True, text=True, timeout=60, check=False
    )


def rendered(
    values: dict[str, str], version: str = VERSIONS[-1], *, is_upgrade: bool = False
) -> dict[str, dict[str, Any]]:
    """All objects of a release named "demo", by kind and name."""
    words = ["template", "demo", *(["--is-upgrade"] if is_upgrade else [])]
    done = helm(*words, "--kube-version", version, values=values)
    assert done.returncode == 0, done.stderr
    objects = [document for document in yaml.safe_load_all(done.stdout) if document]
    return {f"{object_['kind']}/{object_['metadata']['name']}": object_ for object_ in objects}


def pod(values: dict[str, str], *, is_upgrade: bool = False) -> dict[str, Any]:
    objects = rendered(values, is_upgrade=is_upgrade)
    spec: dict[str, Any] = objects["StatefulSet/demo"]["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize("name", SETS)
def test_helm_and_the_schemas_find_nothing(name: str) -> None:
    linted = helm("lint", "--strict", values=SETS[name])
    assert linted.returncode == 0, linted.stdout
    for version in VERSIONS:
        for document in rendered(SETS[name], version).values():
            if not document["apiVersion"].startswith(OPERATOR):
                kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({}, "tls.secret: name the Secret"),
        ({"insecure": "true", "tls.secret": "certs"}, "insecure: must be false"),
        ({"insecure": "true", "replicas": "2"}, "replicas"),
        ({"insecure": "true", "clusterId": ""}, "clusterId"),
        ({"insecure": "true", "store": "file:///tmp"}, "store"),
        ({"insecure": "true", "repicas": "3"}, "repicas"),
        ({"insecure": "true", "options.node-id": "7"}, "options.node-id: the chart sets it"),
        (
            {
                "insecure": "true",
                "serviceAccount.create": "false",
                "serviceAccount.annotations.a": "b",
            },
            "serviceAccount.annotations: needs serviceAccount.create",
        ),
        ({"insecure": "true", "serviceMonitor.interval": "often"}, "interval"),
        ({"insecure": "true", "prometheusRule.runbookBase": "docs"}, "runbookBase"),
    ],
)
def test_values_of_no_use_are_refused_by_name(values: dict[str, str], told: str) -> None:
    done = helm("template", "demo", "--kube-version", VERSIONS[0], values=values)
    assert done.returncode != 0
    assert told in done.stderr


def test_controllers_find_each_other_before_any_is_ready() -> None:
    objects = rendered(SETS["tls"])
    controllers = objects["StatefulSet/demo"]["spec"]
    peers = objects["Service/demo-peers"]
    assert controllers["podManagementPolicy"] == "Parallel"
    assert controllers["serviceName"] == peers["metadata"]["name"]
    assert peers["spec"]["clusterIP"] == "None"
    assert peers["spec"]["publishNotReadyAddresses"] is True
    assert "publishNotReadyAddresses" not in objects["Service/demo"]["spec"]
    for service in (peers, objects["Service/demo"], objects["PodDisruptionBudget/demo"]):
        selected = service["spec"]["selector"].get("matchLabels", service["spec"]["selector"])
        assert selected.items() <= controllers["template"]["metadata"]["labels"].items()


def test_pods_have_an_account_that_a_cloud_gives_its_identity() -> None:
    account = rendered(SETS["watched"])["ServiceAccount/demo"]
    assert account["metadata"]["annotations"] == {
        "eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/a"
    }
    assert account["automountServiceAccountToken"] is False
    assert pod(SETS["watched"])["serviceAccountName"] == "demo"
    labels = rendered(SETS["watched"])["StatefulSet/demo"]["spec"]["template"]["metadata"]["labels"]
    assert labels["identity"] == "yes"


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"serviceAccount.name": "mine"}, "mine"),
        ({"serviceAccount.create": "false", "serviceAccount.name": "theirs"}, "theirs"),
        ({"serviceAccount.create": "false"}, None),
    ],
)
def test_an_account_of_another_maker_is_used_and_not_made(
    values: dict[str, str], name: str | None
) -> None:
    given = {**SETS["tls"], **values}
    assert pod(given).get("serviceAccountName") == name
    accounts = [key for key in rendered(given) if key.startswith("ServiceAccount/")]
    is_made = values.get("serviceAccount.create") != "false"
    assert accounts == ([f"ServiceAccount/{name}"] if is_made else [])


def test_the_operator_scrapes_each_controller_ready_or_not() -> None:
    objects = rendered(SETS["watched"])
    monitor = objects["ServiceMonitor/demo"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    (endpoint,) = monitor["spec"]["endpoints"]
    assert (endpoint["path"], endpoint["scheme"]) == ("/metrics", "http")
    selected = monitor["spec"]["selector"]["matchLabels"].items()
    services = [object_ for object_ in objects.values() if object_["kind"] == "Service"]
    found = [
        service["metadata"]["name"]
        for service in services
        if selected <= service["metadata"]["labels"].items()
        and endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    ]
    assert found == ["demo-peers"]
    assert not any(key.startswith("ServiceMonitor/") for key in rendered(SETS["tls"]))


def test_the_rules_are_those_of_the_file_with_runbooks_where_they_are_published() -> None:
    rule = rendered(SETS["watched"])["PrometheusRule/demo"]
    wanted = yaml.safe_load((ROOT / "deploy/prometheus/streammeta.rules.yml").read_text())
    for group in wanted["groups"]:
        for group_rule in group["rules"]:
            notes = group_rule["annotations"]
            notes["runbook_url"] = f"https://docs.example.org/{notes['runbook_url']}"
    assert rule["spec"] == wanted
    assert not any(key.startswith("PrometheusRule/") for key in rendered(SETS["tls"]))


def test_volumes_outlive_their_pods_and_never_become_empty_voters() -> None:
    controllers = rendered(SETS["tls"])["StatefulSet/demo"]["spec"]
    kept = controllers["persistentVolumeClaimRetentionPolicy"]
    assert set(kept.values()) == {"Retain"}
    assert [container["name"] for container in pod(SETS["tls"])["initContainers"]] == ["format"]
    assert "initContainers" not in pod(SETS["tls"], is_upgrade=True)


@pytest.mark.parametrize("name", SETS)
def test_one_voter_is_away_by_intent_at_a_time(name: str) -> None:
    objects = rendered(SETS[name])
    if objects["StatefulSet/demo"]["spec"]["replicas"] == 1:
        assert "PodDisruptionBudget/demo" not in objects
    else:
        assert objects["PodDisruptionBudget/demo"]["spec"]["maxUnavailable"] == 1


@pytest.mark.parametrize("name", SETS)
def test_containers_are_shut_in(name: str) -> None:
    spec = pod(SETS[name])
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in (*spec["initContainers"], *spec["containers"]):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "memory" in container["resources"]["limits"]


def test_the_image_has_the_user_that_the_chart_names() -> None:
    users = re.findall(r"--uid (\d+)", (ROOT / "docker/Dockerfile").read_text())
    assert users
    assert {str(pod(SETS["tls"])["securityContext"]["runAsUser"])} == set(users)


def test_probes_ask_the_process_and_readiness_the_quorum() -> None:
    controller = pod(SETS["tls"])["containers"][0]
    paths = {name: controller[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness")}
    assert {path["path"] for path in paths.values()} == {"/livez"}
    assert controller["readinessProbe"]["httpGet"]["path"] == "/readyz"
    ports = {port["name"]: port["containerPort"] for port in controller["ports"]}
    assert ports["http"] == 9092
    startup = controller["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 600


def parsed(container: dict[str, Any], ordinal: int) -> dict[str, Any]:
    """Parameters that a container's command is called with, in the pod of an ordinal."""
    shell, flag, script = container["command"]
    assert (shell, flag) == ("sh", "-ec")
    told = subprocess.run(
        [shell, flag, re.sub(r"exec streammeta", "printf '%s\\\\n'", script)],
        capture_output=True,
        text=True,
        check=True,
        env={"HOSTNAME": f"demo-{ordinal}", "PATH": "/usr/bin:/bin"},
    )
    words = shlex.split(told.stdout)
    context = click.Context(cli)
    command: click.Command = cli
    while isinstance(command, click.Group):
        found = command.get_command(context, words.pop(0))
        assert found is not None
        command = found
    prefix = "STREAMMETA_" + ("STORAGE_FORMAT" if command.name == "format" else "CONTROLLER")
    given = {variable["name"]: variable["value"] for variable in container["env"]}
    known = {f"{prefix}_{(param.name or '').upper()}" for param in command.params}
    known |= {str(param.envvar) for param in command.params if param.envvar}
    ours = {name for name in given if name.startswith("STREAMMETA_")}
    assert ours <= known
    words += [
        word
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for name in (f"{prefix}_{(parameter.name or '').upper()}", str(parameter.envvar))
        if name in given
        for word in ([parameter.opts[0]] if parameter.is_flag else [parameter.opts[0], given[name]])
    ]
    return command.make_context(command.name, words).params


@pytest.mark.parametrize("name", SETS)
def test_the_commands_take_what_the_containers_say(name: str) -> None:
    spec = pod(SETS[name])
    replicas = int(SETS[name].get("replicas", "3"))
    for ordinal in range(replicas):
        formatted = parsed(spec["initContainers"][0], ordinal)
        controller = parsed(spec["containers"][0], ordinal)
        assert formatted["node_id"] == controller["node_id"] == ordinal + 1
        assert formatted["data_dir"] == controller["data_dir"]
        voters = {voter.key.node_id: voter.endpoint for voter in formatted["voters"].voters}
        assert len(voters) == replicas
        assert voters[controller["node_id"]] == controller["peer_advertise"]
        assert (controller["tls_key"] is not None) == ("tls.secret" in SETS[name])
        mounts = [mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]]
        assert str(controller["data_dir"]).startswith(tuple(mounts))
