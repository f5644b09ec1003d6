"""Gradients of a quadratic loss with known tr(Sigma) and |G|^2."""

import numpy as np

# Loss (x - c)' H (x - c) / 2 with random c: the gradient is H (x - mean) plus H times c's noise.
CURVATURE = np.geomspace(1.0, 0.1, 12)


def squared_norms(rng, *, noise_scale, sizes, shape):
    """m and M of updates cut into micro-batches of `sizes`, an array of `shape` each."""
    gradient = CURVATURE / np.linalg.norm(CURVATURE)
    deviation = gradient * np.sqrt(noise_scale)  # tr(Sigma) = noise_scale, |G|^2 = 1.
    sizes = np.array(sizes)
    noise = rng.normal(size=(*shape, len(sizes), len(CURVATURE)))
    micro = gradient + deviation * noise / np.sqrt(sizes)[:, None]
    weights = sizes / sizes.sum()
    batch = np.einsum("k,...kd->...d", weights, micro)
    return np.sum(micro**2, axis=-1) @ weights, np.sum(batch**2, axis=-1)
