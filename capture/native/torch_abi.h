/* What torch says of a tensor, read through its stable C ABI and through the properties of its Python class.

   No offset into an object of torch's is used but one: where a Python tensor keeps the pointer that its ``_cdata`` gives.
   That place is looked for when the module is set up, and read afresh each time, as ``swap_tensors`` and ``.data =``
   replace what is behind a tensor. Where it is not found, ``_cdata`` itself is asked. */
#ifndef CAPTURE_TORCH_ABI_H
#define CAPTURE_TORCH_ABI_H

#include "native.h"

/* Metadata of one tensor. The device is not in it: an address is on one device only. ``sizes`` and ``strides`` are torch's own arrays: valid until the tensor changes. */
typedef struct {
    void *data;
    int64_t dim;
    const int64_t *sizes, *strides;
    int32_t dtype;
} TensorMeta;

/* The functions were found: else nothing below may be called. */
int abi_is_known(void);
/* A plain tensor or parameter, whose class overrides nothing. */
int is_plain_tensor(PyObject *tensor);
/* Reads the metadata of a plain strided tensor: 1; 0 where torch gives an error. For other tensors torch would print an
   error. */
int read_meta(PyObject *tensor, TensorMeta *meta);
int read_address(PyObject *tensor, uint64_t *address);
/* The tensor requires a gradient: 1, 0, or -1 with an exception set. */
int requires_gradient(PyObject *tensor);

/* It holds several tensors: torch's own comparison, which is C++, throws where it looks at the strides of one. 1, 0, -1. */
int is_nested(PyObject *tensor);

/* Nobody put an attribute on the tensor: 1, 0. */
int is_bare(PyObject *tensor);

/* Whether it has attributes with these names, a frozenset, and no others: 1, 0, -1. */
int has_attributes(PyObject *tensor, PyObject *names);

/* Nor a gradient or a hook; 0 also for what is no plain tensor. */
int has_nothing_on_it(PyObject *tensor);

/* Bits that change what the elements mean without changing where they lie: 1 conjugate, 2 negative; -1 with an exception.
   Only asked where ``may_be_lazy`` says that they may be set, as asking takes as long as all the rest. */
int lazy_bits(PyObject *tensor);
int may_be_lazy(const TensorMeta *meta);

#define EITHER 2 /* nothing depends on whether it requires a gradient: not asked */

/* Metadata that is kept, of one tensor or of several that are alike. */
typedef struct {
    const PyTypeObject *type;
    int64_t dim;
    int32_t dtype;
    char requires, lazy, asks; /* ``requires`` may be EITHER */
    Py_ssize_t users;
    int64_t shape[]; /* sizes, then strides */
} Geometry;
typedef struct {
    const void *data;
    Geometry *geometry; /* NULL: of none */
} KnownTensor;
/* Notes class, metadata and address of a tensor: 0, or -1 with an exception set. */
int know_tensor(PyObject *tensor, KnownTensor *known);
void forget_tensor(KnownTensor *known);
/* Keeps one geometry for it and those of the others that are alike, of which the last ones are looked at. */
void share_geometry(KnownTensor *known, const KnownTensor *others, Py_ssize_t count);
/* The tensor has this class and metadata, at this address: 1, 0, -1. */
int is_as_known(PyObject *tensor, const KnownTensor *known);
/* All of these tensors have the class, metadata and address that are known of them: 1, 0, -1. */
int are_as_known(PyObject *const *tensors, const KnownTensor *known, Py_ssize_t count);

/* A comparison of the metadata of tensors, and the tuple that it takes, which is kept from call to call. */
typedef struct {
    PyObject *check;
    PyObject *arguments; /* a tuple that nobody else has and the collector does not see; or NULL */
} Comparison;

/* What is known of a tensor of a call, see ``trusted.c``. */
typedef struct {
    enum { UNTRUSTED, APART, STATIC } kind;
    const PyObject *object; /* its address; not kept */
    PyObject *reference;    /* STATIC: weak */
    KnownTensor meta;       /* STATIC */
    uint64_t address;
} Trust;

typedef struct {
    Py_ssize_t count;  /* tensors of a call */
    Trust *known;
    char *is_static;   /* of each: its argument is declared so */
    char *is_repeat;   /* of each: an earlier one is the same object */
    PyObject *make;    /* gives the comparison of the others, whose tensors and positions it takes */
    Comparison others;
    uint64_t apart;    /* ``apart_number`` when they were noted */
    int holds;         /* something is noted */
    unsigned takes;    /* times that it may be noted anew */
} Trusted;

/* ``is_static``: a tuple of one truth a tensor. ``shared``: as for the fast path. 0, -1. */
int begin_trusted(Trusted *self, PyObject *make, PyObject *is_static, PyObject *shared);
void end_trusted(Trusted *self);
/* All that are trusted are as they were, and their addresses are written; the others are not looked at. 1, 0, -1. */
int trusted_hold(Trusted *self, PyObject *const *tensors, uint64_t *addresses);
/* Torch's comparison found these as they have to be: notes which of them to trust. 0, -1. */
int take_trusted(Trusted *self, PyObject *const *tensors, const uint64_t *addresses);

int add_torch_abi(PyObject *module);
int add_static_tensors(PyObject *module);

#endif
