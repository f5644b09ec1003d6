"""The gradient noise scale in words, with what is disputed about it."""

from kbatch.analysis.noise_scale import NoiseScale
from kbatch.document.number_text import listed, readable
from kbatch.study.caveat import Caveat
from kbatch.study.study_record import Study

NOISE_FOOTNOTE = (
    "Noise scale: in examples, of the late half of training, with its 95 % interval; batches far "
    "above it save hardly any updates."
)


def noise_scale_text(scale: NoiseScale) -> str:
    """Writes a noise scale with its interval, or what is known of an unresolved one."""
    if scale.value is not None and scale.interval is not None:
        interval = scale.interval
        bounds = f"{readable(interval.low, 2)} to {readable(interval.high, 2)}"
        return f"{readable(scale.value, 2)} ({bounds})"
    if scale.at_least:
        return f"n/a (unresolved: at least {readable(scale.at_least, 2)})"
    return "n/a (unresolved)"


def noise_caveats(study: Study) -> tuple[Caveat, ...]:
    """Says how far the noise scale may be trusted, nothing where none was measured."""
    measured = [trial for trial in study.trials if trial.noise_scale is not None]
    if not measured:
        return ()
    optimizers = dict.fromkeys(e.optimizer for trial in measured for e in trial.executions)
    others = [name for name in optimizers if name not in (None, "SGD")]
    found = [
        Caveat(
            "noise scale",
            "The noise scale is that of the weights that each trial came to, and grows while a "
            "model learns: it tells the order of a useful batch size, not a bound.",
            ("noise_scale",),
        )
    ]
    if others:
        names = listed(map(str, others))
        found.append(
            Caveat(
                f"noise scale under {names}",
                f"The noise scale is derived for SGD. Whether it tells a useful batch size under "
                f"{names} is disputed: Merrill et al. (2025, arXiv:2505.23971) train on from one "
                "checkpoint at several batch sizes instead. Trials of several sizes to one target "
                "compare them directly.",
                ("noise_scale",),
            )
        )
    return tuple(found)
