"""Each engine as the tests use it: started once, stopped at the end."""

import os
import secrets

import pytest
from slurm_cluster import missing, slurm_cluster


@pytest.fixture(scope="session")
def slurm():
    pytest.importorskip("submitit")
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with slurm_cluster() as folder:
        yield folder


@pytest.fixture(scope="session")
def ray():
    """Two simulated nodes of Ray, which `ray.init()` finds, in this process and in others."""
    # Ray listens on all addresses of the host: a token closes it, if it is set before the import.
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    own |= {"RAY_USAGE_STATS_ENABLED": "0"}
    os.environ |= own
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    # Ray takes 127.0.0.1 for the host's address in its network.
    node = {"num_cpus": 2, "node_ip_address": "127.0.0.2"}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    try:
        cluster.add_node(**node)
        os.environ["RAY_ADDRESS"] = cluster.address
        yield cluster
    finally:
        cluster.shutdown()
        for name in (*own, "RAY_ADDRESS"):
            os.environ.pop(name, None)


@pytest.fixture(scope="session")
def dask():
    pytest.importorskip("distributed")


@pytest.fixture
def engine(request):
    """The name of an engine that runs."""
    request.getfixturevalue(request.param)
    return request.param
