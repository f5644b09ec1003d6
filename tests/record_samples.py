"""Every kind of record that a report takes, in each of the forms that its fields may have."""

import inference_factory
import input_profile_factory as inputs
from figure_studies import learned_study, max_batch_result
from inference_factory import make_check
from recommendation_factory import NOTHING, make_pilot, make_recommendation, make_timings
from records_factory import make_study, make_trial
from training_profile_factory import in_executions, left_out, training_profile

from kbatch.memory.result import ProbeRecord
from kbatch.records.notes import Note
from kbatch.study.comparison import compare
from kbatch.study.trial import Objective

# One of each kind, with all that it may hold.
RECORDS = {
    "study": make_study(),
    "comparison": compare(make_study(name="adam"), make_study(name="sgd")),
    "inference": inference_factory.make_profile(
        checks=(make_check(60, outcome="missed", latencies_s=()), make_check(30)),
        target_ms=5.0,
        output_changes={"float32": 0.01},
        class_changes={"float32": 0.002},
        compared_examples=1000,
        noted=(Note.of("inputs_made"),),
    ),
    "input": inputs.make_profile(long_run=inputs.make_long_run(300, waiting=0.5)),
    "largest batch": max_batch_result(),
    "training": training_profile(),
    "recommendation": make_recommendation(noted=(Note.of("rows_differ", elements=3),)),
}
# What is unknown, empty or of another form in them.
FORMS = RECORDS | {
    "study of three executions": learned_study(3),
    "study without a result": make_study(
        make_trial(64, status="failed"), make_trial(128, status="out_of_memory")
    ),
    "comparison without an answer": compare(
        *(make_study(make_trial(64, objective=Objective("val_f1", "max")), name=n) for n in "ab")
    ),
    "inference of nothing": inference_factory.make_profile(
        inference_factory.make_failed(1), memory=(), memory_limit_bytes=None, environment=None
    ),
    "input without extras": inputs.make_profile(changes=(), timeline=(), noted=(), wait_share=None),
    "input of two bounds": inputs.make_profile(long_run=inputs.make_long_run(700, 900)),
    "largest batch of one size": max_batch_result(
        probes=(ProbeRecord(1, 100, "fits", 2.0),),
        max_batch_size=1,
        requested_block_bytes=10,
        free_bytes=20,
        largest_free_block_bytes=8,
    ),
    "training without points": training_profile(
        left_out(8), environment=None, memory_limit_bytes=None
    ),
    "training in executions": in_executions(),
    "recommendation of nothing": make_recommendation(
        **NOTHING, unknown={"memory": Note.of("ran_out_of_memory")}, base_learning_rate=None
    ),
    "recommendation of one size": make_recommendation(updates=make_timings(sizes=(8,))),
    "recommendation without a noise scale": make_recommendation(pilot=make_pilot(scatter=30.0)),
}
