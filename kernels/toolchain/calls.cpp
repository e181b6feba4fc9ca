// Calls of C++ one after another, without Python between them. See toolchain/calls.py.

#include <cstdint>

extern "C" {

struct Call {
    void (*function)(const void*);
    const void* arguments;
};

void intarsia_run(const Call* calls, int64_t count) {
    for (int64_t i = 0; i < count; i++) calls[i].function(calls[i].arguments);
}

}  // extern "C"
