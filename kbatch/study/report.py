"""What a report says of a study."""

import contextlib
import functools
import json
from collections.abc import Iterable

from kbatch.page.content import Figure
from kbatch.page.numbers import count_range, pluralize
from kbatch.page.section import Fact, Note, Section, environment_facts
from kbatch.records.plan import Plan
from kbatch.study.caveats import caveats
from kbatch.study.figures import (
    gpu_timeline,
    learning_curves,
    noise_scale,
    pareto,
    time_to_target,
    trials,
)
from kbatch.study.names import caption
from kbatch.study.study import Study, refuse_empty
from kbatch.study.table import learning_rate_table, lettered, marked_table, trial_table


def study_section(study: Study) -> Section:
    refuse_empty(study)
    environment = study.search.environment if study.search else None
    page, table = study.decide().page, trial_table(study)
    notes = lettered(caveats(study), table)
    curves = 0  # Batch sizes that were trained for several epochs.
    with contextlib.suppress(ValueError):  # None was trained for one.
        info = learning_curves.learning_curves_info(study)
        curves = sum(len(curve.points) > 1 for curve in info.curves)
    if curves > MOST_CURVES:
        text = (
            f"Learning curves and noise scales of {pluralize(curves, 'batch size')} are left out, "
            "too many to be told apart here: `kbatch plot DIR --figure learning-curves` and "
            "`--figure noise-scale` draw them."
        )
        notes = (*notes, Note("", "left out", text))
    return Section(
        kind="study",
        name=study.name,
        headline=page.headline,
        lead=tuple(filter(None, (page.certainty, page.change, page.rate, page.settings))),
        details=tuple(filter(None, (page.limit, page.search))),
        conditions=caption(study.conditions),
        figures=_figures(study, curves),
        tables=tuple(filter(None, (marked_table(table, notes), learning_rate_table(study)))),
        notes=notes,
        command=environment.command if environment else None,
        settings=_settings(study),
        environment=environment_facts(environment),
    )


def _settings(study: Study) -> tuple[Fact, ...]:
    settings = study.search.settings if study.search else {}
    executions = [e for trial in study.trials for e in trial.executions]
    examples = study.conditions.examples
    seen = count_range(examples or (0,), "example")
    seeds = dict.fromkeys("none" if e.seed is None else str(e.seed) for e in executions)

    def different(values: Iterable[object]) -> str:
        known = dict.fromkeys(str(value) for value in values if value is not None)
        return ", ".join(known) or "n/a (no model was built)"

    plan = () if study.plan is None else (Fact("plan", _plan_text(study.plan)),)
    return (
        *plan,
        *(Fact(name, json.dumps(value, ensure_ascii=False)) for name, value in settings.items()),
        Fact("training data", f"{seen} an epoch" if examples else "n/a (no trial completed)"),
        Fact("optimizer", different(e.optimizer for e in executions)),
        Fact("jit_compile", different(e.jit_compile for e in executions)),
        Fact("seeds of the executions", ", ".join(seeds)),
    )


def _plan_text(plan: Plan) -> str:
    """Say what a search settled before its first training."""
    most, cut = plan.micro_batch_size, plan.reason in ("given", "cut")
    size = f"micro-batches of up to {most:,}" if cut and most else "batches go through whole"
    why = {"given": "as given", "fits": "the largest fits", "cut": "the most that fit"}
    parts = {None: "", True: ", seen to train as the whole batch does", False: ", not exact"}
    size = f"{size} ({why.get(plan.reason, plan.reason)}){parts[plan.parts_equal]}"
    policy = plan.dtype_policy or "the policy of each trial"
    return f"number {plan.number}, made in {plan.duration_s:.1f} s: {policy}; {size}"


# More curves than these nobody can tell apart, and they make a page heavy.
MOST_CURVES = 24


# Title and module; that of the decision first.
_FIGURES = {
    "trials": ("Throughput and quality by batch size", trials),
    "pareto": ("Quality against throughput", pareto),
    "learning-curves-updates": ("Learning curves over updates", learning_curves),
    "learning-curves-seconds": ("Learning curves over training time", learning_curves),
    "time-to-target": ("Time and updates to the target", time_to_target),
    "noise-scale": ("Gradient noise scale and goodput", noise_scale),
    "gpu-timeline": ("GPUs during the named trial", gpu_timeline),
}


def _has_data(name: str, study: Study, curves: int) -> bool:
    """Return whether a study has the data of a figure; a `ValueError` says what to measure."""
    match name:
        case "pareto":
            return len(pareto.pareto_info(study).points) > 1
        case "learning-curves-updates" | "learning-curves-seconds":
            return 0 < curves <= MOST_CURVES
        case "time-to-target":
            return bool(time_to_target.time_to_target_info(study))
        case "noise-scale":
            return len(noise_scale.noise_scale_info(study).curves) <= MOST_CURVES
        case "gpu-timeline":
            return bool(gpu_timeline.gpu_timeline_info(study))
    return True


def _figures(study: Study, curves: int) -> tuple[Figure, ...]:
    """Offer the figures for which a study has the data."""
    found = []
    for name, (title, module) in _FIGURES.items():
        try:
            if not _has_data(name, study, curves):
                continue
        except ValueError:  # A report leaves out what was not measured.
            continue
        height_in = module.HEIGHT_IN
        if module is noise_scale and noise_scale.noise_scale_info(study).goodput is None:
            height_in = noise_scale.ALONE_IN
        options = {"against": name.rpartition("-")[2]} if module is learning_curves else {}
        plot = getattr(module, f"plot_{module.__name__.rpartition('.')[2]}")
        found.append(
            Figure(
                name=name,
                title=title,
                height_in=height_in,
                draw=functools.partial(plot, study, **options),
                shape="alone" if name == "trials" else "small",
            )
        )
    return tuple(found)
