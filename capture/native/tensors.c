/* Tensors: those that a recording reads where they are, are as they were: metadata and address, 10 ns each.

   torch is not asked: what it keeps of a tensor is compared as bytes. Where that lies is found out by
   ``_torch_private_layout``, which also tries whether every change of metadata shows, and else does without. */
#include "native.h"

#include <string.h>

typedef struct {
    PyObject *tensor;
    PyTypeObject *type;
    const char *address;
    unsigned char requires;
} One;

typedef struct {
    PyObject_HEAD
    Layout layout;
    Py_ssize_t count;
    One *ones;
    char *bytes; /* of each, end - begin */
    vectorcallfunc vectorcall;
} Tensors;

static PyTypeObject TensorsType;

int is_tensors(PyObject *one)
{
    return Py_TYPE(one) == &TensorsType;
}

unsigned char requires_gradient(const Layout *layout, const char *impl)
{
    const char *meta = pointer_at(impl, layout->meta_in_impl);
    if (meta == NULL)
        return 0;
    for (Py_ssize_t i = 0; i < layout->zero_count; i++)
        if (pointer_at(meta, layout->zeros[i]) != NULL)
            return 2;
    return meta[layout->requires_in_meta] != 0;
}

const char *data_of(const Layout *layout, const char *impl)
{
    const char *storage = pointer_at(impl, layout->storage_in_impl);
    return storage == NULL ? NULL : pointer_at(storage, layout->data_in_storage);
}

#define COUNTS 8 /* behind the table of virtual functions */

uint64_t count_at(const char *from)
{
    uint64_t found;
    memcpy(&found, from + COUNTS, sizeof(found));
    return found;
}

int see(const Layout *layout, PyObject *tensor, Seen *seen)
{
    *seen = (Seen){.object = tensor, .type = Py_TYPE(tensor), .references = Py_REFCNT(tensor)};
    if (tensor == Py_None)
        return 0;
    seen->impl = pointer_at((const char *)tensor, layout->impl_in_object);
    seen->storage = seen->impl == NULL ? NULL : pointer_at(seen->impl, layout->storage_in_impl);
    if (seen->storage == NULL)
        return 0;
    seen->data = pointer_at(seen->storage, layout->data_in_storage);
    seen->holders = count_at(seen->impl);
    seen->users = count_at(seen->storage);
    seen->requires = requires_gradient(layout, seen->impl);
    return 1;
}

int is_as_seen(const Layout *layout, PyObject *tensor, const Seen *was, const char *bytes)
{
    Seen now;
    return tensor == was->object && Py_TYPE(tensor) == was->type && see(layout, tensor, &now) &&
           now.impl == was->impl && now.storage == was->storage && now.data == was->data &&
           now.holders == was->holders && now.users == was->users && now.references == was->references &&
           now.requires == was->requires && memcmp(now.impl + layout->begin, bytes, width_of(layout)) == 0;
}

int tensors_hold(PyObject *object)
{
    Tensors *self = (Tensors *)object;
    const Layout *layout = &self->layout;
    Py_ssize_t width = layout->end - layout->begin;
    const char *bytes = self->bytes;
    for (Py_ssize_t i = 0; i < self->count; i++, bytes += width) {
        One *one = &self->ones[i];
        const char *impl = pointer_at((const char *)one->tensor, layout->impl_in_object);
        if (Py_TYPE(one->tensor) != one->type || impl == NULL || memcmp(impl + layout->begin, bytes, width) != 0 ||
            data_of(layout, impl) != one->address || requires_gradient(layout, impl) != one->requires)
            return 0;
    }
    return 1;
}

static PyObject *tensors_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    (void)args;
    if (PyVectorcall_NARGS(nargsf) || names != NULL) {
        PyErr_SetString(PyExc_TypeError, "tensors take no arguments");
        return NULL;
    }
    return PyBool_FromLong(tensors_hold(self));
}

static int tensors_traverse(PyObject *object, visitproc visit, void *arg)
{
    Tensors *self = (Tensors *)object;
    for (Py_ssize_t i = 0; i < self->count; i++)
        Py_VISIT(self->ones[i].tensor);
    return 0;
}

static int tensors_clear(PyObject *object)
{
    Tensors *self = (Tensors *)object;
    while (self->count) {
        PyObject *tensor = self->ones[--self->count].tensor;
        Py_DECREF(tensor);
    }
    return 0;
}

static void tensors_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    tensors_clear(self);
    PyMem_Free(((Tensors *)self)->ones);
    PyMem_Free(((Tensors *)self)->bytes);
    Py_TYPE(self)->tp_free(self);
}

int layout_from(PyObject *given, Layout *layout)
{
    PyObject *zeros;
    if (!PyArg_ParseTuple(
            given, "nnnnnO!nnn", &layout->impl_in_object, &layout->storage_in_impl, &layout->data_in_storage,
            &layout->meta_in_impl, &layout->requires_in_meta, &PyTuple_Type, &zeros, &layout->begin, &layout->end,
            &layout->sizes))
        return -1;
    layout->zero_count = PyTuple_GET_SIZE(zeros);
    if (layout->zero_count > MOST_ZEROS || layout->end - layout->begin > 256 || layout->end < layout->begin ||
        layout->sizes < layout->begin || layout->sizes > layout->end) {
        PyErr_SetString(PyExc_ValueError, "no such layout");
        return -1;
    }
    for (Py_ssize_t i = 0; i < layout->zero_count; i++)
        layout->zeros[i] = PyLong_AsSsize_t(PyTuple_GET_ITEM(zeros, i));
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *tensors_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"tensors", "layout", NULL};
    PyObject *given, *where;
    Layout layout = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!", names, &PyTuple_Type, &given, &PyTuple_Type, &where) ||
        layout_from(where, &layout) < 0)
        return NULL;
    Tensors *self = (Tensors *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(given), width = layout.end - layout.begin;
    self->vectorcall = tensors_call;
    self->layout = layout;
    self->ones = PyMem_New(One, count + 1);
    self->bytes = PyMem_New(char, count * width + 1);
    if (self->ones == NULL || self->bytes == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *tensor = PyTuple_GET_ITEM(given, i);
        const char *impl = pointer_at((const char *)tensor, layout.impl_in_object);
        self->ones[i] = (One){
            Py_NewRef(tensor), Py_TYPE(tensor), data_of(&layout, impl), requires_gradient(&layout, impl)};
        memcpy(self->bytes + i * width, impl + layout.begin, width);
        self->count = i + 1;
    }
    return (PyObject *)self;
}

static PyTypeObject TensorsType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "capture._native.Tensors",
    .tp_doc = "Tells whether tensors still have the metadata and the address that they had.",
    .tp_basicsize = sizeof(Tensors),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Tensors, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = tensors_new,
    .tp_dealloc = tensors_dealloc,
    .tp_traverse = tensors_traverse,
    .tp_clear = tensors_clear,
};

int add_tensors(PyObject *module)
{
    return PyType_Ready(&TensorsType) < 0 ? -1 : PyModule_AddObjectRef(module, "Tensors", (PyObject *)&TensorsType);
}
