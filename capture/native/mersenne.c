/* How far one state of a Mersenne twister lies behind another. Others may draw from a generator while a body is watched:
   a state that is reached by drawing tells that from one that the body set. */
#include "native.h"

#include <string.h>

#define WORDS 624
#define MIDDLE 397

static uint32_t twisted(uint32_t one, uint32_t next)
{
    uint32_t mixed = (one & 0x80000000u) | (next & 0x7fffffffu);
    return (mixed >> 1) ^ (next & 1 ? 0x9908b0dfu : 0);
}

/* The words of the next block in place. */
static void turn(uint32_t *words)
{
    int i = 0;
    for (; i < WORDS - MIDDLE; i++)
        words[i] = words[i + MIDDLE] ^ twisted(words[i], words[i + 1]);
    for (; i < WORDS - 1; i++)
        words[i] = words[i + MIDDLE - WORDS] ^ twisted(words[i], words[i + 1]);
    words[i] = words[MIDDLE - 1] ^ twisted(words[i], words[0]);
}

static int take_words(const Py_buffer *given, uint32_t *words)
{
    if (given->len != WORDS * (Py_ssize_t)sizeof(uint64_t)) {
        PyErr_SetString(PyExc_ValueError, "a state has 624 words of eight bytes");
        return -1;
    }
    for (int i = 0; i < WORDS; i++) {
        uint64_t word;
        memcpy(&word, (const char *)given->buf + sizeof(word) * i, sizeof(word));
        words[i] = (uint32_t)word;
    }
    return 0;
}

static PyObject *blocks_between(PyObject *module, PyObject *args)
{
    Py_buffer first, second;
    Py_ssize_t limit, blocks = -1;
    uint32_t words[WORDS], wanted[WORDS];
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*n", &first, &second, &limit))
        return NULL;
    int failed = take_words(&first, words) < 0 || take_words(&second, wanted) < 0;
    for (Py_ssize_t i = 0; !failed && i <= limit; i++) {
        if (memcmp(words, wanted, sizeof(words)) == 0) {
            blocks = i;
            break;
        }
        turn(words);
        if (i % 1024 == 1023)
            failed = PyErr_CheckSignals() < 0;
    }
    PyBuffer_Release(&first);
    PyBuffer_Release(&second);
    return failed ? NULL : PyLong_FromSsize_t(blocks);
}

static PyObject *after_blocks(PyObject *module, PyObject *args)
{
    Py_buffer given;
    Py_ssize_t blocks;
    uint32_t words[WORDS];
    (void)module;
    if (!PyArg_ParseTuple(args, "y*n", &given, &blocks))
        return NULL;
    int failed = take_words(&given, words) < 0;
    for (Py_ssize_t i = 0; !failed && i < blocks; i++)
        turn(words);
    PyBuffer_Release(&given);
    PyObject *found = failed ? NULL : PyBytes_FromStringAndSize(NULL, WORDS * (Py_ssize_t)sizeof(uint64_t));
    for (int i = 0; found && i < WORDS; i++) {
        uint64_t word = words[i];
        memcpy(PyBytes_AS_STRING(found) + sizeof(word) * i, &word, sizeof(word));
    }
    return found;
}

static PyMethodDef functions[] = {
    {"blocks_between", blocks_between, METH_VARARGS,
     "How many blocks of 624 numbers lie between two states of a Mersenne twister; -1 if more than the limit."},
    {"after_blocks", after_blocks, METH_VARARGS,
     "The state of a Mersenne twister after so many blocks of 624 numbers, where it stands at the end of one."},
    {NULL, NULL, 0, NULL},
};

int add_mersenne(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
