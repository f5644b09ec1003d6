import json

import pytest
from records_factory import make_execution, make_gpu, make_trial, make_usage

from kbatch.records.json_codec import RecordError, read_record, write_record
from kbatch.records.usage import USAGE_METRICS, GpuSample, UsageRecord


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


@pytest.mark.parametrize("examples", [None, 0])
def test_without_examples_there_is_no_energy_a_sample(examples):
    assert make_usage(make_gpu()).joules_per_sample(examples) is None


def test_without_gpus_no_figure_of_a_gpu_is_known():
    usage = make_usage()
    assert usage.gpus is None
    assert usage.metrics(100) == {}
    assert usage.cpu_cores_busy == pytest.approx(1.5)


def test_no_work_is_no_utilization_and_no_unknown():
    assert make_usage(make_gpu(utilization=0.0, energy_j=0.0)).metrics(10) == {
        "joules_per_sample": 0.0,
        "gpu_power_w": 300.0,
        "gpu_utilization": 0.0,
    }


def test_joules_per_sample_of_a_run_count_the_examples_seen():
    run = make_execution(usage=make_usage(make_gpu(energy_j=2 * 2874.0)))
    assert run.joules_per_sample == 2.0
    assert make_execution().joules_per_sample is None
    assert make_execution(usage=make_usage()).joules_per_sample is None


def test_a_trial_averages_over_the_executions_that_were_measured():
    runs = [make_execution(usage=make_usage(make_gpu(energy_j=2874.0 * n))) for n in (1, 3)]
    trial = make_trial(64, *runs, make_execution())
    assert trial.mean(lambda e: e.joules_per_sample) == 2.0


@pytest.mark.parametrize("gpus", [5, "GPU", {"a": 1}])
def test_gpus_that_are_none_are_damaged(gpus, tmp_path):
    path = tmp_path / "r.json"
    write_record(make_usage(make_gpu()), path)
    document = json.loads(path.read_text())
    document["record"]["gpus"] = gpus
    path.write_text(json.dumps(document))
    with pytest.raises(RecordError, match="damaged"):
        read_record(UsageRecord, path)


def test_an_empty_sample_knows_its_time_only():
    assert GpuSample(1.0) == GpuSample(1.0, None, None, None)
