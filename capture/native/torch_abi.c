/* Functions of torch's stable C ABI, whose addresses ``torch_private.tensor_reads`` finds by their names, which libtorch
   exports from 2.11 on. They take a handle: the address of an ``at::Tensor``, which is one pointer. */
#include "torch_abi.h"

#include <descrobject.h>
#include <string.h>

typedef int (*GetPointer)(void *tensor, void **found);
typedef int (*GetLong)(void *tensor, int64_t *found);
typedef int (*GetLongs)(void *tensor, int64_t **found);
typedef int (*GetInt)(void *tensor, int32_t *found);

#define MOST_LAZY 8 /* dtypes */
static struct {
    GetPointer data_ptr;
    GetLong dim;
    GetLongs sizes, strides;
    GetInt dtype;
    Py_ssize_t impl_at; /* in a Python tensor; 0: ask ``_cdata`` */
    const PyGetSetDef *cdata, *requires, *nested, *grad, *hooks;
    PyTypeObject *plain[3];
    int32_t complex[MOST_LAZY], real[MOST_LAZY]; /* dtypes, -1 behind the last */
} torch;
static PyObject *s_is_conj, *s_is_neg, *s_is_nested;

int abi_is_known(void)
{
    return torch.data_ptr != NULL;
}

int is_plain_tensor(PyObject *tensor)
{
    const PyTypeObject *type = Py_TYPE(tensor);
    return abi_is_known() && (type == torch.plain[0] || type == torch.plain[1] || type == torch.plain[2]);
}

/* What is behind the tensor now; NULL without an exception. */
static inline void *impl_of(PyObject *tensor)
{
    void *impl;
    if (torch.impl_at > 0) {
        memcpy(&impl, (const char *)tensor + torch.impl_at, sizeof(impl));
        return impl;
    }
    PyObject *found = torch.cdata->get(tensor, torch.cdata->closure);
    impl = found == NULL ? NULL : PyLong_AsVoidPtr(found);
    Py_XDECREF(found);
    put_off_error();
    return impl;
}

int read_address(PyObject *tensor, uint64_t *address)
{
    void *impl = impl_of(tensor), *data = NULL;
    if (impl == NULL || torch.data_ptr(&impl, &data) != 0)
        return 0;
    *address = (uint64_t)(uintptr_t)data;
    return 1;
}

int read_meta(PyObject *tensor, TensorMeta *meta)
{
    void *impl = impl_of(tensor);
    int64_t *sizes = NULL, *strides = NULL;
    if (impl == NULL || torch.data_ptr(&impl, &meta->data) || torch.dim(&impl, &meta->dim) ||
        torch.sizes(&impl, &sizes) || torch.strides(&impl, &strides) || torch.dtype(&impl, &meta->dtype))
        return 0;
    meta->sizes = sizes;
    meta->strides = strides;
    return 1;
}

int requires_gradient(PyObject *tensor)
{
    PyObject *found = torch.requires->get(tensor, torch.requires->closure);
    int requires = found == NULL ? -1 : found == Py_True;
    Py_XDECREF(found);
    return requires;
}

/* A property of a tensor is None: 1, 0; 0 without an exception where it raises. */
static int is_without(PyObject *tensor, const PyGetSetDef *property)
{
    PyObject *found = property->get(tensor, property->closure);
    int without = found == Py_None;
    if (found == NULL)
        put_off_error(); /* a mode of torch functions is Python code */
    Py_XDECREF(found);
    return without;
}

int is_bare(PyObject *tensor)
{
    PyObject **own = _PyObject_GetDictPtr(tensor);
    return own == NULL || *own == NULL || PyDict_GET_SIZE(*own) == 0;
}

int has_attributes(PyObject *tensor, PyObject *names)
{
    PyObject **own = _PyObject_GetDictPtr(tensor), *name, *value;
    Py_ssize_t at = 0, count = own == NULL || *own == NULL ? 0 : PyDict_GET_SIZE(*own);
    int same = count == PySet_GET_SIZE(names);
    while (same > 0 && count && PyDict_Next(*own, &at, &name, &value))
        same = PyUnicode_CheckExact(name) ? PySet_Contains(names, name) : 0; /* others compare by Python code */
    return same;
}

int has_nothing_on_it(PyObject *tensor)
{
    return is_plain_tensor(tensor) && is_bare(tensor) && is_without(tensor, torch.grad) && is_without(tensor, torch.hooks);
}

int is_nested(PyObject *tensor)
{
    if (abi_is_known() && is_plain_tensor(tensor))
        return truth_of(torch.nested->get(tensor, torch.nested->closure));
    return truth_of(PyObject_GetAttr(tensor, s_is_nested));
}

int lazy_bits(PyObject *tensor)
{
    int conjugate = truth_of(PyObject_CallMethodNoArgs(tensor, s_is_conj));
    int negative = conjugate < 0 ? -1 : truth_of(PyObject_CallMethodNoArgs(tensor, s_is_neg));
    return negative < 0 ? -1 : conjugate + 2 * negative;
}

static int is_among(int32_t dtype, const int32_t *dtypes)
{
    int i = 0;
    while (i < MOST_LAZY && dtypes[i] >= 0 && dtypes[i] != dtype)
        i++;
    return i < MOST_LAZY && dtypes[i] == dtype;
}

/* A complex tensor may be conjugate. A real one may be negative where it may be the imaginary part of a conjugate, whose
   elements are every second number. */
int may_be_lazy(const TensorMeta *meta)
{
    if (is_among(meta->dtype, torch.complex))
        return 1;
    if (!is_among(meta->dtype, torch.real))
        return 0;
    for (int64_t i = 0; i < meta->dim; i++)
        if (meta->sizes[i] > 1 && meta->strides[i] % 2 != 0)
            return 0;
    return 1;
}

static inline int same_numbers(const int64_t *some, const int64_t *others, int64_t count)
{
    int64_t i = 0;
    while (i < count && some[i] == others[i])
        i++;
    return i >= count;
}

int know_tensor(PyObject *tensor, KnownTensor *known)
{
    TensorMeta meta;
    *known = (KnownTensor){NULL, NULL};
    if (!read_meta(tensor, &meta)) {
        PyErr_SetString(PyExc_ValueError, "torch's C ABI does not read this tensor");
        return -1;
    }
    int asks = may_be_lazy(&meta), requires = requires_gradient(tensor);
    int lazy = requires < 0 || !asks ? 0 : lazy_bits(tensor);
    if (requires < 0 || lazy < 0)
        return -1;
    size_t bytes = (size_t)meta.dim * sizeof(int64_t);
    Geometry *geometry = PyMem_Malloc(sizeof(*geometry) + 2 * bytes);
    if (geometry == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    *geometry = (Geometry){Py_TYPE(tensor), meta.dim, meta.dtype, (char)requires, (char)lazy, (char)asks, 1};
    memcpy(geometry->shape, meta.sizes, bytes);
    memcpy(geometry->shape + meta.dim, meta.strides, bytes);
    *known = (KnownTensor){meta.data, geometry};
    return 0;
}

void forget_tensor(KnownTensor *known)
{
    if (known->geometry != NULL && --known->geometry->users == 0)
        PyMem_Free(known->geometry);
    known->geometry = NULL;
}

static int are_alike(const Geometry *one, const Geometry *other)
{
    return one->type == other->type && one->dim == other->dim && one->dtype == other->dtype &&
           one->requires == other->requires && one->lazy == other->lazy && one->asks == other->asks &&
           same_numbers(one->shape, other->shape, 2 * one->dim);
}

#define LOOKED_AT 32 /* layers repeat what one has */

void share_geometry(KnownTensor *known, const KnownTensor *others, Py_ssize_t count)
{
    for (Py_ssize_t i = count - 1; i >= 0 && i >= count - LOOKED_AT; i--)
        if (are_alike(known->geometry, others[i].geometry)) {
            others[i].geometry->users++;
            forget_tensor(known);
            known->geometry = others[i].geometry;
            return;
        }
}

static inline int is_same(PyObject *tensor, const KnownTensor *known)
{
    const Geometry *was = known->geometry;
    int64_t dim = 0, *sizes = NULL, *strides = NULL;
    int32_t dtype = 0;
    void *impl, *data = NULL;
    if (Py_TYPE(tensor) != was->type || (impl = impl_of(tensor)) == NULL || torch.data_ptr(&impl, &data) ||
        data != known->data || torch.dim(&impl, &dim) || dim != was->dim || torch.dtype(&impl, &dtype) ||
        dtype != was->dtype || torch.sizes(&impl, &sizes) || !same_numbers(sizes, was->shape, dim) ||
        torch.strides(&impl, &strides) || !same_numbers(strides, was->shape + dim, dim))
        return 0;
    int requires = was->requires == EITHER ? EITHER : requires_gradient(tensor);
    if (requires != was->requires)
        return requires < 0 ? -1 : 0;
    int lazy = was->asks ? lazy_bits(tensor) : 0;
    return lazy < 0 ? -1 : lazy == was->lazy;
}

int is_as_known(PyObject *tensor, const KnownTensor *known)
{
    return is_same(tensor, known);
}

#define LINE 64 /* bytes that a processor brings at once */
#define AHEAD 4 /* tensors */

/* The tensor is looked at soon: have the processor bring what is behind it. Nothing is read, so any address will do. */
static inline void expect_tensor(PyObject *tensor)
{
    const char *impl;
    memcpy(&impl, (const char *)tensor + torch.impl_at, sizeof(impl));
    for (int i = 0; i < 3; i++)
        __builtin_prefetch(impl + i * LINE);
}

int are_as_known(PyObject *const *tensors, const KnownTensor *known, Py_ssize_t count)
{
    int same = 1;
    for (Py_ssize_t i = 0; same > 0 && i < count; i++) {
        if (i + 2 * AHEAD < count)
            __builtin_prefetch(tensors[i + 2 * AHEAD]);
        if (torch.impl_at > 0 && i + AHEAD < count)
            expect_tensor(tensors[i + AHEAD]);
        same = is_same(tensors[i], &known[i]);
    }
    return same;
}

static const PyGetSetDef *property_of(PyObject *type, const char *name)
{
    PyObject *found = PyObject_GetAttrString(type, name);
    const PyGetSetDef *property = NULL;
    if (found != NULL && Py_IS_TYPE(found, &PyGetSetDescr_Type))
        property = ((PyGetSetDescrObject *)found)->d_getset; /* the class outlives this module */
    else if (found != NULL)
        PyErr_Format(PyExc_TypeError, "%s is no property", name);
    Py_XDECREF(found);
    return property;
}

static int take_dtypes(PyObject *given, int32_t *dtypes)
{
    Py_ssize_t count = PyTuple_GET_SIZE(given);
    for (Py_ssize_t i = 0; i < MOST_LAZY; i++)
        dtypes[i] = i < count ? (int32_t)PyLong_AsLong(PyTuple_GET_ITEM(given, i)) : -1;
    return count > MOST_LAZY || PyErr_Occurred() ? -1 : 0;
}

static PyObject *use_abi(PyObject *module, PyObject *args, PyObject *kwargs)
{
    (void)module;
    static char *names[] = {"functions", "impl_at", "base", "plain", "complex_types", "real_types", NULL};
    PyObject *functions, *base, *plain, *complex, *real;
    Py_ssize_t impl_at;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "$O!nOO!O!O!", names, &PyTuple_Type, &functions, &impl_at, &base, &PyTuple_Type, &plain,
            &PyTuple_Type, &complex, &PyTuple_Type, &real))
        return NULL;
    void *found[5];
    if (PyTuple_GET_SIZE(functions) != 5 || PyTuple_GET_SIZE(plain) != 3 || impl_at < 0) {
        PyErr_SetString(PyExc_ValueError, "five functions and three classes");
        return NULL;
    }
    for (int i = 0; i < 5; i++)
        if ((found[i] = PyLong_AsVoidPtr(PyTuple_GET_ITEM(functions, i))) == NULL) {
            PyErr_SetString(PyExc_ValueError, "a function is missing");
            return NULL;
        }
    const PyGetSetDef *cdata = property_of(base, "_cdata");
    const PyGetSetDef *requires = cdata == NULL ? NULL : property_of(base, "requires_grad");
    const PyGetSetDef *nested = requires == NULL ? NULL : property_of(base, "is_nested");
    const PyGetSetDef *grad = nested == NULL ? NULL : property_of(base, "grad");
    const PyGetSetDef *hooks = grad == NULL ? NULL : property_of(base, "_backward_hooks");
    if (PyErr_Occurred() || hooks == NULL || take_dtypes(complex, torch.complex) < 0 ||
        take_dtypes(real, torch.real) < 0)
        return NULL;
    for (int i = 0; i < 3; i++)
        Py_XSETREF(torch.plain[i], (PyTypeObject *)Py_NewRef(PyTuple_GET_ITEM(plain, i)));
    torch.cdata = cdata;
    torch.requires = requires;
    torch.nested = nested;
    torch.grad = grad;
    torch.hooks = hooks;
    torch.impl_at = impl_at;
    torch.dim = (GetLong)found[1];
    torch.sizes = (GetLongs)found[2];
    torch.strides = (GetLongs)found[3];
    torch.dtype = (GetInt)found[4];
    torch.data_ptr = (GetPointer)found[0];
    Py_RETURN_NONE;
}

static PyObject *forget_abi(PyObject *module, PyObject *Py_UNUSED(ignored))
{
    (void)module;
    torch.data_ptr = NULL;
    Py_RETURN_NONE;
}

/* Where an object keeps a word, within its own size; 0 where it does not. */
static PyObject *find_word(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *object;
    unsigned long long word;
    if (!PyArg_ParseTuple(args, "OK", &object, &word))
        return NULL;
    Py_ssize_t end = Py_TYPE(object)->tp_basicsize - (Py_ssize_t)sizeof(word);
    for (Py_ssize_t at = (Py_ssize_t)sizeof(PyObject); at <= end; at += (Py_ssize_t)sizeof(word))
        if (memcmp((const char *)object + at, &word, sizeof(word)) == 0)
            return PyLong_FromSsize_t(at);
    return PyLong_FromLong(0);
}

static PyObject *list_from(const int64_t *items, int64_t count)
{
    PyObject *list = PyTuple_New((Py_ssize_t)count);
    for (int64_t i = 0; list != NULL && i < count; i++) {
        PyObject *item = PyLong_FromLongLong(items[i]);
        if (item == NULL)
            Py_CLEAR(list);
        else
            PyTuple_SET_ITEM(list, (Py_ssize_t)i, item);
    }
    return list;
}

static PyObject *tensor_metadata(PyObject *module, PyObject *tensor)
{
    (void)module;
    TensorMeta meta;
    if (!is_plain_tensor(tensor) || !read_meta(tensor, &meta))
        Py_RETURN_NONE;
    int requires = requires_gradient(tensor), lazy = requires < 0 || !may_be_lazy(&meta) ? 0 : lazy_bits(tensor);
    if (requires < 0 || lazy < 0)
        return NULL;
    return Py_BuildValue(
        "KNNiii", (unsigned long long)(uintptr_t)meta.data, list_from(meta.sizes, meta.dim),
        list_from(meta.strides, meta.dim), (int)meta.dtype, requires, lazy);
}

static PyMethodDef functions[] = {
    {"use_abi", (PyCFunction)(void (*)(void))use_abi, METH_VARARGS | METH_KEYWORDS,
     "From now on tensors are read through these functions of torch's C ABI."},
    {"forget_abi", forget_abi, METH_NOARGS, "Tensors are read through Python from now on."},
    {"find_word", find_word, METH_VARARGS, "Offset of a word in an object, or 0."},
    {"tensor_metadata", tensor_metadata, METH_O,
     "Address, sizes, strides, dtype, requires_grad and lazy bits as C reads them; None for what it does not."},
    {NULL, NULL, 0, NULL},
};

int add_torch_abi(PyObject *module)
{
    s_is_conj = PyUnicode_InternFromString("is_conj");
    s_is_neg = PyUnicode_InternFromString("is_neg");
    s_is_nested = PyUnicode_InternFromString("is_nested");
    return s_is_conj == NULL || s_is_neg == NULL || s_is_nested == NULL ? -1 : PyModule_AddFunctions(module, functions);
}
