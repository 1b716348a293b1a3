// A library with all that C++ and torch's operators may leave to the end of a process. Each end writes a line.
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <string>

static std::string path(const char *suffix) {
    const char *rank = getenv("RANK");
    return rank ? getenv("ENDS") + std::string("/" NAME) + suffix : "/dev/null";
}

static void say(const std::string &line) { std::ofstream(path(""), std::ios::app) << line << std::endl; }

struct End {
    const char *name;
    explicit End(const char *name) : name(name) {}
    ~End() { say(name); }
};

static End of_library("static");
static std::ofstream buffered;

static void at_exit() { say("atexit"); }
static void on_end(int code, void *) { say("on_exit " + std::to_string(code)); }
__attribute__((destructor)) static void fini() { say("fini_array"); }

extern "C" __attribute__((visibility("default"))) void begin() {
    static End of_function("static of a function");
    static thread_local End of_thread("thread_local");
    (void)&of_thread;
    atexit(at_exit);
    on_exit(on_end, nullptr);
    buffered.open(path(".buffered"));
    buffered << "not flushed";
    std::ios::sync_with_stdio(false);
    std::cout << "cout, not flushed";
    printf("printf, not flushed\n");
}

#ifdef WITH_TORCH
#include <ATen/ATen.h>
#include <torch/library.h>

static at::Tensor twice(const at::Tensor &x) { return x + x; }

TORCH_LIBRARY(own, library) {
    library.def("twice(Tensor x) -> Tensor");
    library.impl("twice", c10::DispatchKey::CPU, twice);
}

static struct Last {
    at::Tensor one = at::ones(1);
    ~Last() {
        auto found = c10::Dispatcher::singleton().findSchemaOrThrow("own::twice", "");
        auto answer = found.typed<at::Tensor(const at::Tensor &)>().call(one);
        say("twice 1 is " + std::to_string(answer.item<float>()));
    }
} last;
#endif
