"""Read operation times measured on silicon from the tables of NVIDIA's AIConfigurator.

Each table is converted to efficiencies, the data sheet's lower bound divided by the measured time,
and interpolated. The lower bound is computed for the exact shape of a query, so a shape that was
not measured gets its own time. Operations without a table fall back to the roofline, and `missing`
lists them.
"""

import importlib.metadata
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from llmops.build.environment import installed_version
from llmops.build.plan.gpu_specs import GpuSpec
from llmops.build.plan.timing import roofline
from llmops.build.plan.timing.interpolation import InterpolationGrid
from llmops.build.plan.timing.operation_times import AttentionShape, ExpertsShape, OperationTimes
from llmops.build.plan.timing.roofline import RooflineTimes
from llmops.build.quant_formats import FORMATS
from llmops.distribution import missing_extra
from llmops.errors import InputError

_MS = 1e-3
#: Names of dtypes in the attention tables, by the dtype of the KV cache.
_ATTENTION = {"bf16": "bfloat16", "fp8": "fp8", "int8": "bfloat16"}
_UNUSED = ("framework", "version", "device", "op_name", "kernel_source", "beam_width")
_NO_GATE = "moe_torch_flow_nongated"
#: Distributions of tokens over experts in the tables, best first. Real routing is skewed, and
#: AIConfigurator itself plans Mixtral, Qwen 3 MoE and GPT-OSS with the exponent 1.2.
ROUTING = ("power_law_1.2", "power_law_1.01", "balanced")
#: Maximum share of the data sheet's HBM bandwidth. The value is the share that the tables show for
#: large weights and few tokens (95th percentiles: H100 0.85 and 0.87, H200 0.84 and 0.88, A100
#: 0.85). Decode attention was measured on a KV cache that is partly in L2, and is faster than the
#: data sheet's bandwidth on H100 and A100; the KV cache of a real batch is far larger.
HBM_CEILING = 0.85
#: TensorRT-LLM versions whose tables are used, best first.
VERSIONS = ("1.2.0rc5", "1.0.0", "1.3.0rc10")


def package_root() -> Path | None:
    """Return the folder of the installed AIConfigurator's data, or None. Nothing is imported."""
    try:
        files = importlib.metadata.distribution("aiconfigurator")
    except importlib.metadata.PackageNotFoundError:
        return None
    root = Path(str(files.locate_file("aiconfigurator")))
    return root if (root / "systems").is_dir() else None


def pyarrow_problem() -> str:
    """Return the reason for which pyarrow cannot be imported, or an empty text.

    Newer versions of pyarrow need NumPy 2, and Triton's Python backend needs NumPy 1, so the import
    of an installed pyarrow can fail.
    """
    try:
        import pyarrow.parquet  # noqa: F401
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"
    except Exception as error:  # noqa: BLE001  a binary module that does not fit raises what it likes
        return f"pyarrow {installed_version('pyarrow')} cannot be imported ({' '.join(str(error).split())[:200]})"
    return ""


def table_folder(gpu: GpuSpec) -> Path | None:
    """Return the folder of a GPU's tables, or None if AIConfigurator has no tables for the GPU."""
    root = package_root()
    if root is None or gpu.silicon is None:
        return None
    folders = (root / "systems" / "data" / gpu.silicon / "trtllm" / version for version in VERSIONS)
    return next((folder for folder in folders if (folder / "gemm_perf.parquet").is_file()), None)


class SiliconTimes(RooflineTimes):
    """The measured operation times of one GPU.

    Operations without a measurement get the roofline.
    """

    def __init__(self, gpu: GpuSpec, folder: Path) -> None:
        super().__init__(gpu)
        self.folder = folder
        self.missing: set[str] = set()
        self.label = f"silicon (AIConfigurator, {gpu.silicon}, TensorRT-LLM {folder.name})"
        self._grids: dict[tuple[Any, ...], InterpolationGrid | None] = {}

    def gemm(self, m: int, n: int, k: int, precision: str) -> float:
        bound = self.ideal(*roofline.gemm_work(m, n, k, precision))
        grid = self._grid(("gemm", precision), lambda: self._gemm_grid(precision))
        return self._measured(f"{precision} gemm", grid, (m, n, k), bound) or super().gemm(m, n, k, precision)

    def prefill(self, prompts: int, tokens: int, prefix: int, attention: AttentionShape) -> float:
        bound = self.ideal(*roofline.prefill_work(prompts, tokens, prefix, attention), attention.compute)
        grid = self._grid(("prefill", attention), lambda: self._prefill_grid(attention))
        measured = self._measured("prefill attention", grid, (prompts, prefix + tokens), bound)
        return measured or super().prefill(prompts, tokens, prefix, attention)

    def decode(self, batch: int, length: int, attention: AttentionShape) -> float:
        bound = self.ideal(*roofline.decode_work(batch, length, attention), "bf16")
        grid = self._grid(("decode", attention), lambda: self._decode_grid(attention))
        measured = self._measured("decode attention", grid, (batch, length), bound)
        return measured or super().decode(batch, length, attention)

    def moe(self, tokens: int, experts: ExpertsShape, precision: str) -> float:
        bound = self.ideal(*roofline.moe_work(tokens, experts, precision))
        grid = self._grid(("moe", experts, precision), lambda: self._moe_grid(experts, precision))
        return self._measured(f"{precision} experts", grid, (tokens,), bound) or super().moe(tokens, experts, precision)

    def all_reduce(self, values: int, ranks: int) -> float:
        if ranks == 1:
            return 0.0
        grid = self._grid(("all_reduce", ranks), lambda: self._all_reduce_grid(ranks))
        measured = self._measured("all-reduce", grid, (values,), self.all_reduce_work(values, ranks))
        return measured or super().all_reduce(values, ranks)

    def _measured(self, name: str, grid: InterpolationGrid | None, point: tuple[float, ...], bound: float) -> float:
        """Return the seconds of the operation `name` at a point, or 0 if its tables are missing.

        `grid` has the measured efficiencies, and `bound` is the lower bound in seconds by the data
        sheet. Without a grid, the operation is added to `missing`.
        """
        if grid is None:
            self.missing.add(name)
            return 0.0
        return bound / grid.at(*point)

    def _grid(self, key: tuple[Any, ...], load: Callable[[], InterpolationGrid | None]) -> InterpolationGrid | None:
        if key not in self._grids:
            self._grids[key] = load()
        return self._grids[key]

    def _gemm_grid(self, precision: str) -> InterpolationGrid | None:
        rows = self._rows("gemm", gemm_dtype=FORMATS[precision].gemm)
        quantise = self._dynamic_scales if precision == "fp8" else None

        def seconds(row: dict[str, Any]) -> float:
            # The fp8 rows were measured with scales computed at run time. ModelOpt's checkpoints
            # contain the scales, so the time of the computation is subtracted.
            return float(row["latency"]) * _MS - (quantise.at(row["m"], row["k"]) if quantise else 0.0)

        points: dict[tuple[int, ...], float] = {}
        for row in rows:
            if row["m"] > 0:
                bound = self.ideal(*roofline.gemm_work(row["m"], row["n"], row["k"], precision))
                points[row["m"], row["n"], row["k"]] = bound / max(bound, seconds(row))
        return InterpolationGrid(points) if points else None

    @cached_property
    def _dynamic_scales(self) -> InterpolationGrid | None:
        rows = self._rows("computescale")
        # Some rows have the time zero, because the operation was shorter than the clock's
        # resolution.
        return (
            InterpolationGrid({(row["m"], row["k"]): max(1e-9, row["latency"] * _MS) for row in rows}) if rows else None
        )

    def _prefill_grid(self, attention: AttentionShape) -> InterpolationGrid | None:
        kind = {"kv_cache_dtype": _ATTENTION[attention.kv]}
        if attention.latent:
            rows = self._rows("context_mla", **kind)
        else:
            compute = _ATTENTION[attention.compute]
            rows = self._windowed("context_attention", attention, attn_dtype=compute, **kind)

        def bound(row: dict[str, Any], heads: AttentionShape) -> float:
            return self.ideal(*roofline.prefill_work(row["batch_size"], row["isl"], 0, heads), attention.compute)

        near = _nearest_heads(rows, attention)
        return _grid_of(((r["batch_size"], r["isl"]), bound(r, heads), r["latency"] * _MS) for r, heads in near)

    def _decode_grid(self, attention: AttentionShape) -> InterpolationGrid | None:
        kind = {"kv_cache_dtype": _ATTENTION[attention.kv]}
        if attention.latent:
            rows = self._rows("generation_mla", **kind)
        else:
            rows = self._windowed("generation_attention", attention, **kind)

        def bound(row: dict[str, Any], heads: AttentionShape) -> float:
            return self.ideal(*roofline.decode_work(row["batch_size"], row["step"] + row["isl"], heads), "bf16")

        near = _nearest_heads(rows, attention)
        return _grid_of(
            (((r["batch_size"], r["step"] + r["isl"]), bound(r, heads), r["latency"] * _MS) for r, heads in near),
            HBM_CEILING,
        )

    def _moe_grid(self, experts: ExpertsShape, precision: str) -> InterpolationGrid | None:
        dtype = FORMATS[precision].moe
        found = (self._rows("moe", "kernel_source", moe_dtype=dtype, distribution=d) for d in ROUTING)
        rows = [_as_gated(row) for row in next(filter(None, found), [])]
        grid = self._split_grid(rows, experts, precision)
        coarser = replace(experts, tp=experts.tp // 2) if experts.tp > 1 else None
        whole = self._split_grid(rows, coarser, precision) if coarser else None
        if grid and whole and coarser and self._slower(grid, experts, whole, coarser, precision):
            return whole
        return grid

    def _split_grid(
        self, rows: list[dict[str, Any]], experts: ExpertsShape, precision: str
    ) -> InterpolationGrid | None:
        names = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
        requested = (experts.hidden, experts.intermediate, experts.top_k, experts.count, experts.tp, experts.ep)

        def bound(row: dict[str, Any]) -> float:
            like = ExpertsShape(*(row[name] for name in names))
            return self.ideal(*roofline.moe_work(row["num_tokens"], like, precision))

        near = _nearest(rows, names, requested)
        return _grid_of(((row["num_tokens"],), bound(row), row["latency"] * _MS) for row in near)

    def _slower(
        self,
        fine: InterpolationGrid,
        experts: ExpertsShape,
        coarse: InterpolationGrid,
        coarser: ExpertsShape,
        precision: str,
    ) -> bool:
        """Return True if half of each expert takes longer than the whole at the largest batch.

        A kernel with such times was badly tuned when measured (Mixtral 8x22B over 8 H100). The
        efficiency of the coarser split is then a better estimate.

        Args:
            fine: The efficiencies for `experts`, by number of tokens.
            experts: The experts, split over a number of ranks.
            coarse: The efficiencies for `coarser`, by number of tokens.
            coarser: The same experts, split over half as many ranks.
            precision: The format of the weights.
        """
        tokens = fine.ticks[0][-1]
        half = self.ideal(*roofline.moe_work(tokens, experts, precision)) / fine.at(tokens)
        return half > self.ideal(*roofline.moe_work(tokens, coarser, precision)) / coarse.at(tokens)

    def _all_reduce_grid(self, ranks: int) -> InterpolationGrid | None:
        rows = self._rows("custom_allreduce", num_gpus=min(ranks, self.gpu.per_node))
        return _grid_of(
            ((row["message_size"],), self.all_reduce_work(row["message_size"], row["num_gpus"]), row["latency"] * _MS)
            for row in rows
        )

    def _windowed(self, table: str, attention: AttentionShape, **equal: Any) -> list[dict[str, Any]]:
        """Return the rows of `table` for the attention's window.

        If the window was not measured with this head dimension, the rows without a window are
        returned. `equal` has the values that other columns of a row must have, by column.
        """
        found = self._rows(table, window_size=attention.window, **equal)
        like = [row for row in found if row["head_dim"] == attention.head_dim]
        return like or self._rows(table, window_size=0, **equal)

    def _rows(self, table: str, keep: str = "", **equal: Any) -> list[dict[str, Any]]:
        path = self.folder / f"{table}_perf.parquet"
        if not path.is_file() or None in equal.values():
            return []
        filters = [(name, "==", value) for name, value in equal.items()] or None
        import pyarrow.parquet

        table_ = pyarrow.parquet.read_table(path, filters=filters)
        rows: list[dict[str, Any]] = table_.drop_columns(
            [c for c in _UNUSED if c in table_.column_names and c != keep]
        ).to_pylist()
        return rows


def _as_gated(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of experts without a gate, with the width of gated experts of the same size.

    Experts without a gate (Nemotron) have two matrices and not three (AIConfigurator
    `collector/trtllm/collect_moe.py`).
    """
    return {**row, "inter_size": row["inter_size"] * 2 // 3} if row.get("kernel_source") == _NO_GATE else row


def _grid_of(points: Iterable[tuple[tuple[int, ...], float, float]], ceiling: float = 1.0) -> InterpolationGrid | None:
    """Return a grid of efficiencies of at most `ceiling`, or None without measurements.

    A measurement in `points` has coordinates, the data sheet's lower bound in seconds, and the
    measured seconds. The efficiency is the lower bound divided by the measured seconds.
    """
    # A time below the data sheet's lower bound was measured with data in a cache, which a real run
    # does not have.
    table = {where: min(ceiling, bound / measured) for where, bound, measured in points if measured > 0}
    return InterpolationGrid(table) if table else None


def _nearest_heads(
    rows: list[dict[str, Any]], attention: AttentionShape
) -> Iterator[tuple[dict[str, Any], AttentionShape]]:
    """Yield the rows of the measured heads nearest to the requested heads, with their shape."""
    if attention.latent:
        names: tuple[str, ...] = ("num_heads",)
        requested: tuple[int, ...] = (attention.heads,)
    else:
        names = ("head_dim", "num_heads", "num_key_value_heads")
        requested = (attention.head_dim, attention.heads, attention.kv_heads)
    for row in _nearest(rows, names, requested):
        kv_heads, head_dim = row.get("num_key_value_heads", 1), row.get("head_dim", attention.head_dim)
        yield row, replace(attention, heads=row["num_heads"], kv_heads=kv_heads, head_dim=head_dim)


def _nearest(rows: list[dict[str, Any]], names: tuple[str, ...], requested: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return the rows of the measured shape that is nearest to `requested`, by ratio of sizes.

    A shape is the values of the columns `names`.
    """
    if not rows:
        return []

    def distance(shape: tuple[int, ...]) -> float:
        return sum(abs(math.log(measured / size)) for measured, size in zip(shape, requested, strict=True))

    shapes = {tuple(row[name] for name in names) for row in rows}
    best = min(sorted(shapes), key=distance)
    return [row for row in rows if tuple(row[name] for name in names) == best]


CHOICES = ("auto", "silicon", "roofline")


def timing_source(gpu: GpuSpec, choice: str = "auto") -> OperationTimes:
    """Return the operation times of a GPU.

    Args:
        gpu: The GPU to plan for.
        choice: `silicon` requires AIConfigurator's measured tables, and `roofline` uses no tables.
            `auto` uses the tables if they can be read. If installed tables cannot be read, the
            label of the roofline has the reason.

    Raises:
        InputError: `choice` is unknown, or silicon was requested and AIConfigurator has no tables
            for the GPU.
        MissingDependencyError: Silicon was requested, and a library is missing or cannot be
            imported.
    """
    if choice not in CHOICES:
        raise InputError(f"--timing {choice!r} is unknown; choose one of {', '.join(CHOICES)}.")
    if choice == "roofline" or (choice == "auto" and (package_root() is None or gpu.silicon is None)):
        return RooflineTimes(gpu)
    if package_root() is None:
        raise missing_extra("--timing silicon needs AIConfigurator's tables, which are not installed", "silicon")
    folder, unreadable = table_folder(gpu), pyarrow_problem()
    if folder is not None and not unreadable:
        return SiliconTimes(gpu, folder)
    cause = (
        unreadable or f"AIConfigurator {installed_version('aiconfigurator')} has no TensorRT-LLM tables for {gpu.name}"
    )
    if choice == "silicon":
        if unreadable:
            raise missing_extra(f"--timing silicon cannot read the tables: {unreadable}", "silicon")
        raise InputError(f"--timing silicon cannot plan for {gpu.name}: {cause}; give --timing roofline.")
    roofline = RooflineTimes(gpu)
    roofline.label += f", as {cause}"
    return roofline
