"""Launches of a graph by the driver, with a driver that only counts."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch

from capture.engines.cuda.pool import CudaPool
from capture.native import native
from tests.support.fast_paths import fresh as fresh
from tests.support.fast_paths import way as way

DRIVER = """
#include <stddef.h>
int launches, status;
void *executable, *stream;
int cuGraphLaunch(void *one, void *on) { launches++; executable = one; stream = on; return status; }
int cuCtxGetCurrent(void **context) { *context = 0; return 0; }
int cuGraphGetRootNodes(void) { return 0; }
int cuGraphAddMemcpyNode(void) { return 0; }
int cuGraphExecMemcpyNodeSetParams(void) { return 0; }
int cuGraphAddDependencies(void) { return 0; }
int cuGraphAddDependencies_v2(void) { return 0; }
int capturing, count;
int cuStreamGetCaptureInfo_v2(void *on, int *is, unsigned long *id, void **graph, void *const **after, size_t *number)
{ stream = on; *is = capturing; *id = 5; *graph = &launches; return status; }
int cuStreamIsCapturing(void *on, int *is) { stream = on; *is = capturing; return status; }
int cuGraphGetNodes(void *graph, void **nodes, size_t *number) { *number = count; return graph != &launches || nodes; }
"""


@pytest.fixture
def counting_driver(tmp_path: Path) -> ctypes.CDLL:
    """A driver that only counts."""
    compiler = shutil.which(str(sysconfig.get_config_var("CC") or "cc").split()[0])
    assert compiler is not None, "the C module was built with it"
    source, library = tmp_path / "driver.c", tmp_path / "driver.so"
    source.write_text(DRIVER)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    assert native.use_driver(str(library))
    return ctypes.CDLL(str(library))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the driver of this process is a real one")
def test_the_driver_tells_whether_the_current_stream_is_captured(counting_driver: ctypes.CDLL) -> None:
    """Where it gives an error, and on devices beyond those that are known, torch is asked."""
    driver = counting_driver
    capturing, status = ctypes.c_int.in_dll(driver, "capturing"), ctypes.c_int.in_dll(driver, "status")
    here, asked = {"device": 0, 0: 7, 1: 8, 64: 9, "slow": True}, list[int]()

    def slow() -> bool:
        asked.append(here["device"])
        return bool(here["slow"])

    look = native.CaptureLook(slow=slow, stream_of=here.__getitem__, device=lambda: here["device"])
    for device in (0, 1, 0):
        here["device"] = device
        assert [look(), ctypes.c_void_p.in_dll(driver, "stream").value] == [False, here[device]]
        capturing.value = 1
        assert look() is True
        capturing.value = 0
    assert asked == []
    status.value = 1
    assert look() is True
    status.value, here["device"] = 0, 64
    assert look() is True
    here["slow"] = False
    assert look() is False
    assert asked == [0, 64, 64]
    here["device"] = 2
    with pytest.raises(KeyError):
        look()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the driver of this process is a real one")
def test_a_graph_is_launched_where_the_last_one_was(counting_driver: ctypes.CDLL) -> None:
    """Another device, stream or pool, and a launch that fails, are left to Python."""
    driver = counting_driver
    launches, status = ctypes.c_int.in_dll(driver, "launches"), ctypes.c_int.in_dll(driver, "status")
    pool, slow, here = CudaPool.__new__(CudaPool), [], {"device": 0, "stream": 7}
    pool._taken, pool._capture_stream, pool.ran_on, pool.beside = set(), None, 7, set()
    named = {"device": lambda: here["device"], "index": 0, "stream_of": lambda _: here["stream"]}
    given = {**named, "executable": 123, "copies": None, "copy_in": None}
    launch = native.Launch(slow=lambda leaves: slow.append(leaves), pool=pool, **given)
    launch([])
    assert (launches.value, slow) == (1, [])
    assert [ctypes.c_void_p.in_dll(driver, name).value for name in ("executable", "stream")] == [123, 7]
    for name, value in (("device", 1), ("stream", 8)):
        usual, here[name] = here[name], value
        launch([value])
        here[name] = usual
    pool.ran_on = None
    launch([None])
    pool.ran_on = 7
    pool.beside.add(object())  # type: ignore[arg-type]
    launch(["beside"])
    pool.beside.clear()
    assert (launches.value, slow) == (1, [[1], [8], [None], ["beside"]])
    status.value = 1
    launch(["failed"])
    status.value = 0
    assert (launches.value, slow[-1]) == (2, ["failed"])
    with pytest.raises(TypeError, match="CudaPool"):
        native.Launch(slow=len, pool=object(), **given)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the driver of this process is a real one")
def test_nodes_of_a_capture_are_counted(counting_driver: ctypes.CDLL) -> None:
    capturing, status, count = (ctypes.c_int.in_dll(counting_driver, name) for name in ("capturing", "status", "count"))
    counter = native.NodeCount(9)
    count.value = 4
    assert counter() == -1  # nothing is captured
    capturing.value = 1
    assert counter() == 4
    assert ctypes.c_void_p.in_dll(counting_driver, "stream").value == 9
    capturing.value = 2  # the capture failed: its graph is gone
    assert counter() == -1
    capturing.value, status.value = 1, 1
    assert counter() == -1
    with pytest.raises(TypeError):
        counter(1)
