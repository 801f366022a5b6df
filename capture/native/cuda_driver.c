/* Driver: its functions, looked up in its library, so that no header of CUDA is needed and no version of it linked. */
#include "native.h"

#include <dlfcn.h>

Driver driver;

static PyObject *use_driver(PyObject *module, PyObject *path)
{
    (void)module;
    const char *name = PyUnicode_AsUTF8(path);
    if (name == NULL)
        return NULL;
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL)
        Py_RETURN_FALSE;
    driver.launch = (GraphLaunch)dlsym(library, "cuGraphLaunch");
    driver.context = (ContextGet)dlsym(library, "cuCtxGetCurrent");
    driver.roots = (GraphRoots)dlsym(library, "cuGraphGetRootNodes");
    driver.add_copy = (GraphAddCopy)dlsym(library, "cuGraphAddMemcpyNode");
    driver.set_copy = (ExecSetCopy)dlsym(library, "cuGraphExecMemcpyNodeSetParams");
    driver.depend = (GraphDepend)dlsym(library, "cuGraphAddDependencies");
    driver.depend_v2 = (GraphDependV2)dlsym(library, "cuGraphAddDependencies_v2");
    driver.capture_info = (CaptureInfo)dlsym(library, "cuStreamGetCaptureInfo_v2");
    driver.is_capturing = (StreamCapturing)dlsym(library, "cuStreamIsCapturing");
    driver.nodes = (GraphNodes)dlsym(library, "cuGraphGetNodes");
    return PyBool_FromLong(
        driver.launch != NULL && driver.context != NULL && driver.roots != NULL && driver.add_copy != NULL &&
        driver.set_copy != NULL && (driver.depend != NULL || driver.depend_v2 != NULL));
}

static PyMethodDef functions[] = {
    {"use_driver", use_driver, METH_O, "Look for the driver's functions in a library; tells if they are there."},
    {NULL, NULL, 0, NULL},
};

int add_driver(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
