"""Find the batch size for predictions, from their latency, throughput and memory."""

# Defaults of `kbatch.profile_inference`. The command line reads them without TensorFlow.
BULK_EXAMPLES = 256
TIME_BUDGET_S = 60.0
