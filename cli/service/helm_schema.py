"""The values of the Helm chart as pydantic models.

The file deploy/helm/llmops/values.schema.json is generated from these models.

`llmops chart --schema-only` writes the schema. Helm reads it before it renders a template, so an
unknown key, a pool without GPUs or a name that Kubernetes would refuse ends there.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from llmops.gateway.settings import GatewaySettings

#: Settings that the chart sets itself, because they are addresses, secrets or paths of its pods.
CHART_SETTINGS = frozenset({"triton", "replicas", "host", "port", "store", "redis", "kafka", "open"})
#: Settings within a section that the chart sets itself, by the section's model.
_CHART_FIELDS = {"Timeouts": ("drain",), "UsageSettings": ("outbox", "bytes")}

#: Names of pools and builds become parts of object names, whose rules are those of DNS labels.
LABEL = r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$"
#: Names that no pool may have, because other objects of the chart have these names.
RESERVED_POOLS = ("gateway", "gateway-each", "engines", "control")

_Name = Annotated[str, Field(pattern=r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?$")]
_Path = Annotated[str, Field(pattern=r"^/[^\s]*[^\s/]$")]
_Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|Ki|Mi|Gi|Ti|M|G|T)?$")]
_Amount = _Quantity | Annotated[float, Field(gt=0)]
_Count = Annotated[int, Field(ge=1)]
_Seconds = Annotated[int, Field(ge=0)]
_Objects = list[dict[str, Any]]


class _ChartModel(BaseModel):
    model_config = ConfigDict(extra="forbid", alias_generator=to_camel, populate_by_name=True)


class ImageValues(_ChartModel):
    """The references of the three images, and how nodes pull them.

    The templates define the form of a reference.
    """

    gateway: str = ""
    engine: str = ""
    build: str = ""
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    pull_secrets: list[_Name] = []


class StorageValues(_ChartModel):
    """The claim that holds engines and repositories, and the path at which pods mount the claim."""

    claim: _Name = ""
    mount_path: _Path = "/models"


class SecretKey(_ChartModel):
    """A key of a Secret that exists in the namespace."""

    name: _Name = ""
    key: Annotated[str, Field(min_length=1)] = "url"


class SecretName(_ChartModel):
    """A Secret that exists in the namespace."""

    name: _Name = ""


class Secrets(_ChartModel):
    store: SecretKey = SecretKey()
    redis: SecretKey = SecretKey()
    kafka: SecretKey = SecretKey(key="password")
    signing: SecretKey = SecretKey(key="keys")
    environment: SecretName = SecretName()


class KafkaValues(_ChartModel):
    """The settings `kafka` of gateways and control, without the password and the signing keys."""

    servers: str = ""
    topic: Annotated[str, Field(min_length=1)] = "llmops.usage"
    tls: bool = False
    user: str = ""
    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "SCRAM-SHA-512"


class Resources(_ChartModel):
    requests: dict[str, _Amount] = {}
    limits: dict[str, _Amount] = {}


class SchedulingValues(_ChartModel):
    """The nodes on which the scheduler may put pods."""

    node_selector: dict[str, str] = {}
    tolerations: _Objects = []


class GpuSchedulingValues(SchedulingValues):
    """The nodes, the GPU resource and the container runtime of pods that use GPUs.

    `gpu_resource` is the name under which the device plugin offers GPUs or their MIG slices.
    """

    gpu_resource: Annotated[str, Field(pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$")] = "nvidia.com/gpu"
    runtime_class_name: Annotated[str, Field(pattern=r"^([a-z0-9][a-z0-9.-]*)?$")] = ""


class GatewayScaling(_ChartModel):
    enabled: bool = False
    min: _Count = 2
    max: _Count = 10
    streams: _Count = 300
    cpu: Annotated[int, Field(ge=1, le=100)] = 70


class GatewayService(_ChartModel):
    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    port: Annotated[int, Field(ge=1, le=65535)] = 80


class OutboxValues(_ChartModel):
    mebibytes: _Count = 1024


class GatewayValues(SchedulingValues):
    replicas: _Count = 2
    settings: dict[str, Any] = {}
    drain_seconds: _Seconds = 30
    resources: Resources = Resources(requests={"cpu": "1", "memory": "1Gi"}, limits={"memory": "2Gi"})
    service: GatewayService = GatewayService()
    outbox: OutboxValues = OutboxValues()
    autoscaling: GatewayScaling = GatewayScaling()


class ControlValues(SchedulingValues):
    enabled: bool = True
    replicas: _Count = 2
    resources: Resources = Resources(requests={"cpu": "200m", "memory": "512Mi"}, limits={"memory": "1Gi"})


class PoolScaling(_ChartModel):
    enabled: bool = False
    min: _Count = 1
    max: _Count = 4
    waiting: Annotated[float, Field(gt=0)] = 8
    kv: Annotated[float, Field(gt=0, le=1)] = 0.8
    requests: Annotated[float, Field(gt=0)] | None = None


class PoolValues(GpuSchedulingValues):
    """The engine pods that serve one repository.

    `nodes` above 1 makes each engine a LeaderWorkerSet. Pods with a `version` get requests through
    a roll-out; pods without one get requests as soon as they are ready.
    """

    repository: _Path
    models: list[str] = []
    gpus: _Count = 1
    nodes: _Count = 1
    leader_script: str = ""
    replicas: Annotated[int, Field(ge=0)] = 1
    version: bool = False
    startup_minutes: _Count = 60
    drain_seconds: _Seconds = 60
    shared_memory: _Quantity = "16Gi"
    resources: Resources = Resources()
    autoscaling: PoolScaling = PoolScaling()


class BuildJob(GpuSchedulingValues):
    """One build Job: its commands in order, each with the `image` in which it runs."""

    args: Annotated[list[str], Field(min_length=1)]
    finish: list[str] = []
    repo: list[str] = []
    gpus: Annotated[int, Field(ge=0)] = 1
    token: SecretKey = SecretKey(key="token")
    scratch: _Quantity = "20Gi"
    resources: Resources = Resources()


class Keda(_ChartModel):
    enabled: bool = False
    prometheus: Annotated[str, Field(pattern="^https?://")] = "http://prometheus-operated.monitoring:9090"


class Monitoring(_ChartModel):
    enabled: bool = False
    namespace: _Name = "monitoring"
    labels: dict[str, str] = {}
    key: SecretKey = SecretKey(key="key")
    runbooks: Annotated[str, Field(pattern="^(https?://[^#]+)?$")] = ""
    groups: _Objects = []


class _PolicyModel(_ChartModel):
    """A part of a NetworkPolicy.

    Kubernetes drops fields that it does not know, and a rule without fields allows all traffic.
    """

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})


class MatchExpression(_ChartModel):
    key: str
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: list[str] = []


class LabelSelector(_ChartModel):
    """A selector of pods or namespaces. Without fields, it selects all of them."""

    match_labels: dict[str, str] = {}
    match_expressions: list[MatchExpression] = []


class IpBlock(_ChartModel):
    cidr: str
    excluded: Annotated[list[str], Field(alias="except")] = []


class PolicyPeer(_PolicyModel):
    pod_selector: LabelSelector = LabelSelector()
    namespace_selector: LabelSelector = LabelSelector()
    ip_block: IpBlock = IpBlock(cidr="")


class PolicyPort(_PolicyModel):
    port: int | str
    end_port: int = 0
    protocol: str = "TCP"


class EgressRule(_PolicyModel):
    to: Annotated[list[PolicyPeer], Field(min_length=1)] = []
    ports: Annotated[list[PolicyPort], Field(min_length=1)] = []


class Backends(_ChartModel):
    """The egress rules of the NetworkPolicy, by the kind of backend to which they lead."""

    store: list[EgressRule] = []
    redis: list[EgressRule] = []
    kafka: list[EgressRule] = []
    oidc: list[EgressRule] = []
    traces: list[EgressRule] = []
    hub: list[EgressRule] = [EgressRule(ports=[PolicyPort(port=443)])]
    kubernetes: list[EgressRule] = [EgressRule(ports=[PolicyPort(port=443), PolicyPort(port=6443)])]
    extra: list[EgressRule] = []


class Network(_ChartModel):
    enabled: bool = True
    clients: list[PolicyPeer] = []
    admins: list[PolicyPeer] = []
    dns: list[EgressRule] = []
    backends: Backends = Backends()


class ChartValues(_ChartModel):
    """All values of the chart deploy/helm/llmops."""

    image: ImageValues = ImageValues()
    storage: StorageValues = StorageValues()
    secrets: Secrets = Secrets()
    kafka: KafkaValues = KafkaValues()
    open: bool = False
    gateway: GatewayValues = GatewayValues()
    control: ControlValues = ControlValues()
    engines: dict[Annotated[str, Field(pattern=LABEL)], PoolValues] = {}
    builds: dict[Annotated[str, Field(pattern=LABEL)], BuildJob] = {}
    keda: Keda = Keda()
    monitoring: Monitoring = Monitoring()
    network: Network = Network()


def chart_schema() -> dict[str, Any]:
    """Return the JSON Schema of the values, in the draft that Helm 3 and Helm 4 both read."""
    found, settings = ChartValues.model_json_schema(), GatewaySettings.model_json_schema()
    definitions = settings.pop("$defs")
    for name in CHART_SETTINGS:
        del settings["properties"][name]
    for section, fields in _CHART_FIELDS.items():
        for field in fields:
            del definitions[section]["properties"][field]
    definitions["GatewaySettings"] = settings
    assert not set(definitions) & set(found["$defs"])
    found["$defs"] |= definitions
    found["$defs"]["GatewayValues"]["properties"]["settings"] = {"$ref": "#/$defs/GatewaySettings"}
    for name, reserved in (("engines", RESERVED_POOLS), ("builds", ())):
        kinds = found["properties"][name]
        kinds["additionalProperties"] = next(iter(kinds.pop("patternProperties").values()))
        kinds["propertyNames"] = {"pattern": LABEL, "not": {"enum": list(reserved)}} if reserved else {"pattern": LABEL}
    return {"$schema": "http://json-schema.org/draft-07/schema#", **_without_descriptions(found)}


def _without_descriptions(schema: Any) -> Any:
    """Return the schema without titles and descriptions, which Helm does not use."""
    if isinstance(schema, list):
        return [_without_descriptions(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    texts = [name for name in ("title", "description") if isinstance(schema.get(name), str)]
    return {name: _without_descriptions(value) for name, value in schema.items() if name not in texts}
