/* Stack: what the functions called next find where they write nothing. */
#include "native.h"

#include <string.h>

#define DEEP (96 * 1024)

static __attribute__((noinline)) void fill(int byte)
{
    volatile char below[DEEP];
    memset((char *)below, byte, DEEP);
    __asm__ volatile("" : : "r"(below) : "memory");
}

static PyObject *fill_stack(PyObject *module, PyObject *byte)
{
    (void)module;
    long value = PyLong_AsLong(byte);
    if (value == -1 && PyErr_Occurred())
        return NULL;
    fill((int)(value & 0xFF));
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"fill_stack", fill_stack, METH_O, "Fill the part of the stack that the next call will use with this byte."},
    {NULL, NULL, 0, NULL},
};

int add_stack(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
