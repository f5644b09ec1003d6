"""The Kubernetes recipes, against the schemas of Kubernetes itself."""

import copy
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted((EXAMPLES / "kubernetes").glob("*.yaml"))
KUBERNETES = "1.33"


def an_object(required=(), **properties):
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
# `ray start` takes words, so that numbers are quoted.
GROUP = {"rayStartParams": {"type": "object", "additionalProperties": TEXT}, "template": {}}
WORKERS = {"groupName": TEXT, "replicas": COUNT, "minReplicas": COUNT, "maxReplicas": COUNT}
# What a recipe uses of KubeRay's `ray.io/v1`; its pods are checked by Kubernetes' own schema.
RAY_JOB = an_object(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=an_object(["name"], name=TEXT),
    spec=an_object(
        ["entrypoint", "rayClusterSpec"],
        entrypoint=TEXT,
        backoffLimit=COUNT,
        shutdownAfterJobFinishes={"type": "boolean"},
        ttlSecondsAfterFinished=COUNT,
        rayClusterSpec=an_object(
            ["rayVersion", "headGroupSpec", "workerGroupSpecs", "authOptions"],
            rayVersion=TEXT,
            authOptions=an_object(["mode"], mode={"enum": ["disabled", "token"]}),
            headGroupSpec=an_object(["rayStartParams", "template"], **GROUP),
            workerGroupSpecs={
                "type": "array",
                "items": an_object(["groupName", "rayStartParams", "template"], **GROUP, **WORKERS),
            },
        ),
    ),
)


def objects(path):
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all(path.read_text()))


def check(found):
    import jsonschema
    import kubernetes_validate

    if found["kind"] != "RayJob":
        kubernetes_validate.validate(found, KUBERNETES, strict=True)
        return
    jsonschema.validate(found, RAY_JOB)
    cluster = found["spec"]["rayClusterSpec"]
    for number, group in enumerate([cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]):
        pods = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": f"group-{number}"}}
        kubernetes_validate.validate(
            pods | {"template": group["template"]}, KUBERNETES, strict=True
        )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_recipe_is_valid(path):
    pytest.importorskip("kubernetes_validate")
    found = objects(path)
    for one in found:
        check(one)
    claims = {one["metadata"]["name"] for one in found if one["kind"] == "PersistentVolumeClaim"}
    assert claims == {"kbatch-results"}
    assert path.read_text().count("claimName: kbatch-results") == 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_misspelt_field_is_found(path):
    """The check itself: a field of a container, inside of what KubeRay takes too."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    job = copy.deepcopy(objects(path)[-1])
    spec = job["spec"]
    group = spec["rayClusterSpec"]["headGroupSpec"] if job["kind"] == "RayJob" else spec
    group["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        check(job)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_recipe_runs_the_example(path):
    job = objects(path)[-1]["spec"]
    words = job["entrypoint"].split() if "entrypoint" in job else None
    words = words or job["template"]["spec"]["containers"][0]["command"]
    python, script, engine, directory = words
    assert python == "python"
    assert (EXAMPLES.parent / Path(script).relative_to("/app")).is_file()
    assert f"def {engine}(directory):" in (EXAMPLES / "search_on_cluster.py").read_text()
    assert f"mountPath: {directory}" in path.read_text()
