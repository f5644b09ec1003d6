import pytest
from records_factory import make_gpu, make_usage

from kbatch.records.machine import USAGE_METRICS


def test_the_figures_of_several_gpus_are_those_of_all():
    usage = make_usage(
        make_gpu(energy_j=100.0, power_w=200.0, utilization=0.5),
        make_gpu(energy_j=300.0, power_w=600.0, utilization=0.9),
    )
    assert (usage.gpu_energy_j, usage.gpu_power_w) == (400.0, 800.0)
    assert usage.gpu_utilization == pytest.approx(0.7)
    assert usage.joules_per_sample(200) == 2.0


@pytest.mark.parametrize("figure", ["energy_j", "power_w", "utilization"])
def test_a_figure_that_one_gpu_does_not_tell_is_unknown(figure):
    usage = make_usage(make_gpu(), make_gpu(**{figure: None}))
    names = {"energy_j": "joules_per_sample", "power_w": "gpu_power_w"}
    missing = names.get(figure, "gpu_utilization")
    assert set(usage.metrics(100)) == set(USAGE_METRICS) - {missing}
