/* Alike: other tensors have the metadata that some had, and where they lie, 10 ns each.

   What torch keeps of a tensor is compared as bytes, from its sizes on. Where they differ, torch may find the same
   metadata all the same: it is to be asked then. ``_torch_private_layout`` tries that the bytes tell no less. */
#include "native.h"

#include <string.h>

typedef struct {
    PyTypeObject *type;
    uint64_t shift; /* from the storage's memory to the tensor's */
    int requires, empty;
} Kind;

typedef struct {
    PyObject_HEAD
    Layout layout;
    Py_ssize_t count;
    Kind *kinds;
    char *bytes; /* of each, end - sizes */
} Alike;

static PyTypeObject AlikeType;

int is_alike(PyObject *one)
{
    return Py_TYPE(one) == &AlikeType;
}

int alike_hold(PyObject *object, PyObject *const *tensors, Py_ssize_t count, uint64_t *addresses)
{
    Alike *self = (Alike *)object;
    const Layout *layout = &self->layout;
    Py_ssize_t width = layout->end - layout->sizes;
    const char *bytes = self->bytes;
    if (count != self->count)
        return 0;
    for (Py_ssize_t i = 0; i < count; i++, bytes += width) {
        const Kind *kind = &self->kinds[i];
        if (Py_TYPE(tensors[i]) != kind->type)
            return 0;
        const char *impl = pointer_at((const char *)tensors[i], layout->impl_in_object);
        if (impl == NULL || memcmp(impl + layout->sizes, bytes, width) != 0 ||
            (requires_gradient(layout, impl) != 0) != kind->requires)
            return 0;
        const char *data = data_of(layout, impl);
        if (data == NULL && !kind->empty)
            return 0;
        addresses[i] = kind->empty ? 0 : (uint64_t)(uintptr_t)data + kind->shift;
    }
    return 1;
}

/* Addresses of other tensors that are alike, for tests; None where they are not. */
static PyObject *alike_call(PyObject *self, PyObject *args, PyObject *kwargs)
{
    PyObject *given;
    uint64_t addresses[MOST_VALUES];
    static char *names[] = {"tensors", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!", names, &PyTuple_Type, &given))
        return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(given);
    if (!alike_hold(self, &PyTuple_GET_ITEM(given, 0), count, addresses))
        Py_RETURN_NONE;
    PyObject *found = PyTuple_New(count);
    for (Py_ssize_t i = 0; found != NULL && i < count; i++) {
        PyObject *address = PyLong_FromUnsignedLongLong(addresses[i]);
        if (address == NULL)
            Py_CLEAR(found);
        else
            PyTuple_SET_ITEM(found, i, address);
    }
    return found;
}

static void alike_dealloc(PyObject *self)
{
    Alike *alike = (Alike *)self;
    for (Py_ssize_t i = 0; i < alike->count; i++)
        Py_DECREF(alike->kinds[i].type);
    PyMem_Free(alike->kinds);
    PyMem_Free(alike->bytes);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *alike_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"tensors", "layout", NULL};
    PyObject *given, *where;
    Layout layout = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!", names, &PyTuple_Type, &given, &PyTuple_Type, &where) ||
        layout_from(where, &layout) < 0)
        return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(given), width = layout.end - layout.sizes;
    if (count > MOST_VALUES) {
        PyErr_SetString(PyExc_ValueError, "too many tensors");
        return NULL;
    }
    Alike *self = (Alike *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->layout = layout;
    self->kinds = PyMem_New(Kind, count + 1);
    self->bytes = PyMem_New(char, count * width + 1);
    int failed = self->kinds == NULL || self->bytes == NULL;
    if (failed)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count && !failed; i++) {
        PyObject *tensor = PyTuple_GET_ITEM(given, i);
        uint64_t address;
        failed = address_of(tensor, &address) < 0; /* no tensor, or one without a storage */
        if (failed)
            break;
        const char *impl = pointer_at((const char *)tensor, layout.impl_in_object);
        self->kinds[i] = (Kind){
            (PyTypeObject *)Py_NewRef(Py_TYPE(tensor)), address - (uint64_t)(uintptr_t)data_of(&layout, impl),
            requires_gradient(&layout, impl) != 0, address == 0};
        memcpy(self->bytes + i * width, impl + layout.sizes, width);
        self->count = i + 1;
    }
    if (failed)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static PyTypeObject AlikeType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "capture._native.Alike",
    .tp_doc = "Tells where other tensors lie that have the metadata of those it was made of.",
    .tp_basicsize = sizeof(Alike),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_call = alike_call,
    .tp_new = alike_new,
    .tp_dealloc = alike_dealloc,
};

int add_alike(PyObject *module)
{
    return PyType_Ready(&AlikeType) < 0 ? -1 : PyModule_AddObjectRef(module, "Alike", (PyObject *)&AlikeType);
}
