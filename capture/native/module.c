#include "native.h"

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_native",
    .m_doc = "The straight way through a call, in C.",
    .m_size = -1,
};

PyMODINIT_FUNC PyInit__native(void)
{
    PyObject *module = PyModule_Create(&definition);
    int failed = module == NULL || add_modes(module) < 0 || add_driver(module) < 0 ||
                 add_copies(module) < 0 || add_launch(module) < 0 || add_views(module) < 0 ||
                 add_steps(module) < 0 || add_way(module) < 0 || add_ways(module) < 0;
    if (failed)
        Py_CLEAR(module);
    return module;
}
