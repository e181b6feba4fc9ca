"""The files of deploy/cluster: what can be checked of them without a cluster to apply them to."""

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import ray.autoscaler
import typer.main
import yaml
from packaging.requirements import Requirement
from ray.serve.schema import ServeDeploySchema

from intarsia.deploy.cli import app as commands
from intarsia.deploy.serve_app import app

FOLDER = Path(__file__).parents[2] / "deploy" / "cluster"

KUBERNETES = "1.37"

POD, POD_MAP, TEXTS = "pod", "map", {"*": str}

WORKERS = {
    "groupName!": str, "replicas": int, "minReplicas": int, "maxReplicas": int, "numOfHosts": int, "suspend": bool,
    "idleTimeoutSeconds": int, "resources": TEXTS, "labels": TEXTS, "rayStartParams!": TEXTS, "template!": POD,
    "scaleStrategy": {"workersToDelete": [str]},
}  # fmt: skip

CLUSTER = {
    "headGroupSpec!": {
        "template!": POD, "rayStartParams!": TEXTS, "serviceType": str, "enableIngress": bool, "resources": TEXTS,
        "labels": TEXTS, "headService": {"*": object},
    },
    "workerGroupSpecs": [WORKERS],
    "rayVersion": str, "enableInTreeAutoscaling": bool, "suspend": bool, "managedBy": str,
    "authOptions": {"mode": str}, "headServiceAnnotations": TEXTS, "autoscalerOptions": {"*": object},
    "gcsFaultToleranceOptions": {"*": object},
}  # fmt: skip

SPECS: Mapping[str, Any] = {
    "RayCluster": CLUSTER,
    "RayJob": {
        "entrypoint": str, "runtimeEnvYAML": str, "jobId": str, "submissionMode": str, "rayClusterSpec": CLUSTER,
        "clusterSelector": TEXTS, "submitterPodTemplate": POD, "submitterConfig": {"backoffLimit": int},
        "backoffLimit": int, "activeDeadlineSeconds": int, "ttlSecondsAfterFinished": int, "suspend": bool,
        "shutdownAfterJobFinishes": bool, "entrypointNumCpus": float, "entrypointNumGpus": float,
        "entrypointResources": str, "metadata": TEXTS, "managedBy": str, "deletionStrategy": {"*": object},
    },
    "RayService": {
        "serveConfigV2": str, "rayClusterConfig": CLUSTER, "serveService": {"*": object},
        "upgradeStrategy": {"type": str}, "excludeHeadPodFromServeSvc": bool, "rayClusterDeletionDelaySeconds": int,
    },
}  # fmt: skip
"""Fields of `ray.io/v1` and their types, as KubeRay's types have them; `!` must be there. No registry that tests may
install from has KubeRay's own schema."""


def load(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


def faults(value: Any, wanted: Any, place: str) -> Iterator[str]:
    """What does not fit the fields above. Pods are checked by the schema of Kubernetes."""
    if wanted is POD:
        metadata = {"name": "pod"} | value.get("metadata", {})
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": value["spec"]}
        try:
            kubernetes_validate.validate(pod, KUBERNETES, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"{place}: {error}"
    elif isinstance(wanted, list):
        for n, each in enumerate(value):
            yield from faults(each, wanted[0], f"{place}[{n}]")
    elif isinstance(wanted, dict):
        fields = {name.rstrip("!"): kind for name, kind in wanted.items()}
        yield from (f"{place} lacks {name[:-1]}" for name in wanted if name.endswith("!") and name[:-1] not in value)
        for name, inner in value.items():
            if name not in fields and "*" not in fields:
                yield f"{place}.{name} is no field"
            else:
                yield from faults(inner, fields.get(name, fields.get("*")), f"{place}.{name}")
    elif not isinstance(value, wanted):
        yield f"{place} is {value!r}, not {wanted.__name__}"


@pytest.mark.parametrize("name", ["raycluster.yaml", "rayjob.yaml", "rayservice.yaml"])
def test_resources_have_the_fields_that_kuberay_and_kubernetes_know(name: str):
    resource = load(name)
    assert resource["apiVersion"] == "ray.io/v1" and resource["metadata"]["name"]
    assert list(faults(resource["spec"], SPECS[resource["kind"]], name)) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"rayVersion": 2}, "rayVersion is 2, not str"),
        ({"headGroup": {}}, "headGroup is no field"),
        ({"headGroupSpec": {"rayStartParams": {}}}, "headGroupSpec lacks template"),
        ({"headGroupSpec": {"rayStartParams": {}, "template": {"spec": {"containers": [{"nam": "x"}]}}}}, "nam"),
    ],
)
def test_a_wrong_resource_is_found_out(change: dict[str, Any], fault: str):
    spec = load("raycluster.yaml")["spec"] | change
    assert any(fault in each for each in faults(spec, CLUSTER, "spec"))


@pytest.mark.parametrize(("name", "models"), [("serve.yaml", 1), ("serve-models.yaml", 2), ("rayservice.yaml", 1)])
def test_serve_configurations_fit_serve_s_schema_and_our_settings(name: str, models: int):
    found = load(name)
    config = yaml.safe_load(found["spec"]["serveConfigV2"]) if "spec" in found else found
    applications = ServeDeploySchema(**config).applications
    assert len({each.route_prefix for each in applications}) == len(applications) == models
    for application in applications:
        app(application.args)


def test_a_job_s_command_is_one_of_ours():
    program, command, *arguments = shlex.split(load("rayjob.yaml")["spec"]["entrypoint"])
    assert (program, command) == ("intarsia", "batch")
    group: Any = typer.main.get_command(commands)
    context = group.commands[command].make_context(command, arguments)
    assert context.params["num_engines"] == 2 and context.params["tensor_parallel_size"] == 2


def test_the_cluster_file_fits_ray_s_schema():
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    jsonschema.validate(load("ray-cluster.yaml"), schema)


def test_versions_of_ray_are_those_that_the_package_takes():
    project = (FOLDER.parents[1] / "pyproject.toml").read_text()
    wanted = next(line.strip(' ",') for line in project.splitlines() if line.strip().startswith('"ray[serve]'))
    versions = {
        load("raycluster.yaml")["spec"]["rayVersion"],
        load("rayjob.yaml")["spec"]["rayClusterSpec"]["rayVersion"],
        load("rayservice.yaml")["spec"]["rayClusterConfig"]["rayVersion"],
        (FOLDER / "Dockerfile").read_text().partition("rayproject/ray:")[2].partition("-")[0],
    }
    assert len(versions) == 1 and versions.pop() in Requirement(wanted).specifier
