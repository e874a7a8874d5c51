"""The start of an engine whose decoding steps are compiled: whether they can be, where that is kept, what is told."""

from __future__ import annotations

import os
from collections.abc import Callable

from hamburger.engine.types.config import EngineArgs
from hamburger.model.compiled_pieces import CACHE_VARIABLE, compile_cache, is_of_compiler, release_compilers
from hamburger.model.config import ConfigError
from hamburger.model.early_exit import Costs
from hamburger.model.gpu.availability import Backend
from hamburger.model.graphs.decode_graphs import Compiling, DecodeGraphs, buckets


def check_form(args: EngineArgs, *, captures: bool) -> None:
    """captures: whether decoding steps become CUDA graphs. Raises ConfigError for a form that nothing would have."""
    if args.decode_graph_form != "auto" and not captures:
        raise ConfigError(
            f"decode_graph_form is {args.decode_graph_form!r}, but here no decoding step becomes CUDA graphs: that "
            "takes one GPU, the Triton kernels (attention_backend auto, triton or flashinfer) and no enforce_eager. "
            "Use auto."
        )


def compiling_of(args: EngineArgs, backend: Backend, *, captures: bool) -> Compiling | None:
    """What args.compile_num_seqs asks for; None for 0. captures: whether decoding steps become CUDA graphs.

    From now on this process and those that compile for it keep what they compile in compile_cache(). Raises
    ConfigError.
    """
    if not args.compile_num_seqs:
        return None
    if not captures:
        raise ConfigError(
            f"compile_num_seqs is {args.compile_num_seqs}, but only steps that become CUDA graphs are compiled, and "
            "without a GPU and the Triton kernels (attention_backend auto, triton or flashinfer) there are none: use 0."
        )
    # torch reads its folder from here alone, and so do the processes that it starts.
    os.environ[CACHE_VARIABLE] = str(compile_cache())
    return Compiling(args.compile_num_seqs, backend)


def prepare(
    graphs: DecodeGraphs, max_rows: int, compiling: Compiling | None, on_progress: Callable[[str], None]
) -> None:
    """Capture all graphs. on_progress gets a line for each quarter of them, and one for each that is compiled.

    Raises ConfigError where torch.compile fails.
    """
    sizes = buckets(max_rows)[::-1]

    def tell(done: int, total: int) -> None:
        if compiling is not None and sizes[done] <= compiling.rows:
            on_progress(
                f"compiling decoding steps of {_sequences(sizes[done])}: {done} of {total} batch sizes are done"
            )
        elif done == 0 or done * 4 // total > (done - 1) * 4 // total:
            on_progress(f"capturing CUDA graphs: {done} of {total} batch sizes")

    try:
        graphs.prepare(tell)
    except Exception as error:
        if compiling is None or not is_of_compiler(error):
            raise
        raise ConfigError(
            f"compile_num_seqs is {compiling.rows}, but torch.compile fails on this machine: use 0. "
            f"({str(error).strip().splitlines()[0]})"
        ) from error
    finally:
        if compiling is not None:  # or they would be somebody else's
            release_compilers()
    if graphs.exit_costs:
        on_progress(f"early exit: {', '.join(_told(rows, graphs.exit_costs[rows]) for rows in (sizes[-1], sizes[0]))}")
    if compiling is not None:
        seconds = sum(compiling.seconds.values())
        rows = ", ".join(map(str, sorted(compiling.seconds)))
        on_progress(f"decoding steps of {rows} sequences are compiled: {seconds:.1f} s; {compile_cache()} keeps them")


def _told(rows: int, costs: Costs) -> str:
    micro_step, check = 1e3 * costs.micro_step, 1e3 * costs.check
    return f"a micro-step of {_sequences(rows)} takes {micro_step:.3f} ms, asking whether groups go on {check:.3f} ms"


def _sequences(number: int) -> str:
    return f"{number} sequence{'s' * (number != 1)}"
