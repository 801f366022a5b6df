#include "torch_abi.h"

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_native",
    .m_doc = "The straight way through a call, in C.",
    .m_size = -1,
};

PyMODINIT_FUNC PyInit__native(void)
{
    PyObject *module = PyModule_Create(&definition);
    static int (*const parts[])(PyObject *) = {
        add_util, add_dict_versions, add_slots, add_places, add_modes, add_driver, add_stack, add_node_count, add_follow, add_copies, add_launch,
        add_views, add_address_ranges, add_output_filler, add_node_parts, add_torch_abi, add_static_tensors, add_held, add_gradients, add_guards, add_code_watch, add_operator_hook, add_steps, add_profiler,
        add_fast_path, add_fast_paths, add_binder, add_tape, add_mersenne, add_guarded};
    int failed = module == NULL || PyModule_AddIntConstant(module, "VERSION", NATIVE_VERSION) < 0;
    for (size_t i = 0; i < sizeof(parts) / sizeof(*parts) && !failed; i++)
        failed = parts[i](module) < 0;
    if (failed)
        Py_CLEAR(module);
    return module;
}
