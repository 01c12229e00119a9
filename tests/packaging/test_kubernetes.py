"""Manifests for Kubernetes: valid by its schemas, whole, and true of the server that they start."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from lamina.cli import app
from lamina.runtime.config import RuntimeConfig
from lamina.serving.config import ServeConfig
from lamina.serving.ray_config import RayServeConfig

kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="kubernetes-validate is not installed"
)
EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
FOLDER = EXAMPLES / "kubernetes"
LAYERS = ["base", "gpu", "ray", "replicas"]
VERSIONS = ["1.30", kubernetes_validate.latest_version()]


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def only(kind: str, layer: str = "base") -> dict[str, Any]:
    found = [
        one for path in (FOLDER / layer).glob("*.yaml") for one in documents(path) if one.get("kind") == kind
    ]
    assert len(found) == 1
    return found[0]


def pod() -> dict[str, Any]:
    spec: dict[str, Any] = only("Deployment")["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize("version", VERSIONS)
def test_every_resource_is_valid_and_has_no_unknown_field(version):
    checked = 0
    for path in [*(FOLDER / "base").glob("*.yaml"), FOLDER / "replicas" / "disruption.yaml"]:
        for document in documents(path):
            if document["kind"] != "Kustomization":
                kubernetes_validate.validate(document, version, strict=True)
                checked += 1
    assert checked == 5


def ray_pods() -> dict[str, dict[str, Any]]:
    """The pods of KubeRay's RayService by themselves: the validator does not know what that is."""
    cluster = only("RayService", "ray")["spec"]["rayClusterConfig"]
    groups = {
        "head": cluster["headGroupSpec"],
        **{one["groupName"]: one for one in cluster["workerGroupSpecs"]},
    }
    return {
        name: {"apiVersion": "v1", "kind": "Pod", **merge(group["template"], {"metadata": {"name": name}})}
        for name, group in groups.items()
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_pods_of_a_ray_cluster_are_valid_and_mount_what_there_is(version):
    pods, claims = ray_pods(), documents(FOLDER / "ray" / "volumes.yaml")
    for document in [*pods.values(), *claims]:
        kubernetes_validate.validate(document, version, strict=True)
    worker = pods["gpu"]["spec"]
    mounted = {one["name"] for container in worker["containers"] for one in container["volumeMounts"]}
    assert mounted == {one["name"] for one in worker["volumes"]}
    asked = {one["persistentVolumeClaim"]["claimName"] for one in worker["volumes"] if "secret" not in one}
    assert asked == {one["metadata"]["name"] for one in claims}
    dockerfile = (EXAMPLES / "docker" / "cuda.Dockerfile").read_text()
    for one in pods.values():
        assert f"USER {one['spec']['securityContext']['runAsUser']}\n" in dockerfile
        assert one["spec"]["containers"][0]["image"] == "lamina:cuda"  # which kustomization.yaml replaces


def test_ray_serve_is_told_what_lamina_takes():
    service = only("RayService", "ray")["spec"]
    config = yaml.safe_load(service["serveConfigV2"])
    (application,) = config["applications"]
    module, name = application["import_path"].split(":")
    assert callable(getattr(import_module(module), name))
    args = application["args"]
    assert set(args) == {"model", "serve", "settings", "replicas"}
    served, replicas = ServeConfig(**args["serve"]), RayServeConfig(**args["replicas"])
    RuntimeConfig(model=args["model"], **args["settings"])
    assert config["http_options"]["port"] == served.port
    worker = service["rayClusterConfig"]["workerGroupSpecs"][0]
    (container,) = worker["template"]["spec"]["containers"]
    assert float(container["resources"]["limits"]["nvidia.com/gpu"]) == replicas.num_gpus
    assert (worker["minReplicas"], worker["maxReplicas"]) == (replicas.min_replicas, replicas.max_replicas)
    mounts = {one["mountPath"] for one in container["volumeMounts"]}
    assert {args["model"], str(served.api_key_file.parent)} <= mounts
    assert worker["template"]["spec"]["terminationGracePeriodSeconds"] > served.drain_timeout


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("layer, patch", [("gpu", "gpu.yaml"), ("replicas", "replicas.yaml")])
def test_a_patch_changes_what_there_is_into_what_is_valid(version, layer, patch):
    (change,) = documents(FOLDER / layer / patch)
    merged = merge(only("Deployment"), change)
    kubernetes_validate.validate(merged, version, strict=True)
    assert merged != only("Deployment")
    assert len(merged["spec"]["template"]["spec"]["containers"]) == 1


def merge(into: Any, change: Any) -> Any:
    """As kustomize merges: mappings by their keys, lists of what has a name by the names."""
    if isinstance(into, dict) and isinstance(change, dict):
        return {**into, **{key: merge(into.get(key), value) for key, value in change.items()}}
    if isinstance(into, list) and all(isinstance(one, dict) and "name" in one for one in [*into, *change]):
        by_name = {one["name"]: one for one in into}
        assert {one["name"] for one in change} <= by_name.keys()
        return list(merge(by_name, {one["name"]: one for one in change}).values())
    return change


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_names_every_file_that_it_has_and_none_else(layer):
    (layer_file,) = documents(FOLDER / layer / "kustomization.yaml")
    patched = (patch["path"] for patch in layer_file.get("patches", ()))
    named = [*layer_file["resources"], *patched, *layer_file.get("configurations", ())]
    assert all((FOLDER / layer / name).exists() for name in named)
    own = {path.name for path in (FOLDER / layer).iterdir()} - {"kustomization.yaml"}
    assert own == {name for name in named if "/" not in name}
    assert sorted(path.name for path in FOLDER.iterdir()) == LAYERS


def test_the_server_takes_its_arguments_and_answers_its_probes_without_a_key():
    (container,) = pod()["containers"]
    serve = typer.main.get_command(app).commands["serve"]
    options = serve.make_context("serve", list(container["args"])).params
    opened = options["open_routes"]
    (port,) = container["ports"]
    assert port["containerPort"] == ServeConfig(model_names=("m",)).port
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container[probe]["httpGet"]
        assert asked["port"] == port["name"]
        assert any(asked["path"].startswith(route) for route in opened)
    assert pod()["terminationGracePeriodSeconds"] > ServeConfig(model_names=("m",)).drain_timeout


def test_what_refers_to_something_refers_to_what_there_is():
    deployment, service, budget = only("Deployment"), only("Service"), only("PodDisruptionBudget", "replicas")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] == labels
    assert budget["spec"]["selector"]["matchLabels"] == labels
    (replicas,) = documents(FOLDER / "replicas" / "replicas.yaml")
    assert budget["spec"]["minAvailable"] < replicas["spec"]["replicas"]
    claims = {one["metadata"]["name"] for one in documents(FOLDER / "base" / "volumes.yaml")}
    volumes = {one["name"]: one for one in pod()["volumes"]}
    asked = {one["persistentVolumeClaim"]["claimName"] for one in volumes.values() if "secret" not in one}
    assert asked == claims
    for container in [*pod()["containers"], *pod()["initContainers"]]:
        assert {one["name"] for one in container["volumeMounts"]} <= volumes.keys()
    dockerfile = (EXAMPLES / "docker" / "cpu.Dockerfile").read_text()
    assert f"USER {pod()['securityContext']['runAsUser']}\n" in dockerfile
    assert "LAMINA_CACHE_DIR=/cache" in dockerfile
