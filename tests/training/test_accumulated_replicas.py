def test_two_replicas_train_as_stock_mirrored_strategy_does(another_process):
    assert "batch_normalization (BatchNormalization); the loss" in another_process["warned of"][0]
    for name in ("float32", "mixed_float16", "own step"):
        result, tolerance = another_process[name], 2e-3 if "float16" in name else 1e-6
        assert result["weights"] <= tolerance, name
        assert result["loss"] <= max(tolerance, 1e-5), name
        assert result["updates"] == 2 * 3, name
        assert result["warned"] == [], name
