/* Slots: attributes of Python objects, read where their class keeps them, which takes a load instead of a look-up. */
#include "native.h"

#include <structmember.h>
#include <string.h>

struct Slots slots;

Py_ssize_t slot_of(PyObject *type, PyObject *name)
{
    PyObject *found = PyObject_GetAttr(type, name);
    Py_ssize_t at = -1;
    PyErr_Clear();
    if (found != NULL && Py_TYPE(found) == &PyMemberDescr_Type && ((PyMemberDescrObject *)found)->d_member->type == T_OBJECT_EX)
        at = ((PyMemberDescrObject *)found)->d_member->offset;
    Py_XDECREF(found);
    return at;
}

/* Where objects of the class keep an attribute, by its name; -1 with an exception set where there is no slot for it. */
static Py_ssize_t offset_of(PyObject *type, const char *name)
{
    PyObject *key = PyUnicode_FromString(name);
    Py_ssize_t at = key == NULL ? -1 : slot_of(type, key);
    if (key != NULL && at < 0)
        PyErr_Format(PyExc_TypeError, "%s is no slot of the class", name);
    Py_XDECREF(key);
    return at;
}

static PyObject *tell(PyObject *module, PyObject *given)
{
    (void)module;
    if (!PyType_Check(given)) {
        PyErr_SetString(PyExc_TypeError, "this is no class");
        return NULL;
    }
    PyTypeObject *type = (PyTypeObject *)given;
#define FIND(name) \
    if ((found.name = offset_of(given, #name)) < 0) \
        return NULL;
#define TAKE(class, names) \
    if (strcmp(type->tp_name, #class) == 0) { \
        __typeof__(slots.class) found = {.type = type}; \
        names(FIND) Py_INCREF(type); \
        slots.class = found; \
        Py_RETURN_NONE; \
    }
    CLASSES(TAKE)
    PyErr_Format(PyExc_TypeError, "nothing of %s is read", type->tp_name);
    return NULL;
}

PyObject *unset(void)
{
    PyErr_SetString(PyExc_AttributeError, "an attribute that is read in C is not set");
    return NULL;
}

int is_of(PyObject *object, const PyTypeObject *type)
{
    if (Py_TYPE(object) == type)
        return 1;
    PyErr_Format(PyExc_TypeError, "%s is no %s", Py_TYPE(object)->tp_name, type == NULL ? "known class" : type->tp_name);
    return 0;
}

void put(PyObject *object, Py_ssize_t at, PyObject *value)
{
    PyObject **slot = (PyObject **)((char *)object + at), *before = *slot;
    *slot = Py_NewRef(value);
    Py_XDECREF(before);
}

static PyMethodDef functions[] = {
    {"tell", tell, METH_O, "From now on attributes of this class are read where its objects keep them."},
    {NULL, NULL, 0, NULL},
};

int add_slots(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
