/* Copyright (c) the torchx-monarch authors.
 * SPDX-License-Identifier: BSD-3-Clause
 *
 * A stand-in for pyxis: a SPANK plugin with the options that monarch_slurm uses. It makes the mounts in a mount
 * namespace of the task, goes to the working directory, and notes the options; the root filesystem stays the node's.
 * The image "missing" cannot be imported. The plugin's argument is the file of notes.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct spank_handle *spank_t;
struct spank_option {
    char *name, *arginfo, *usage;
    int has_arg, val;
    int (*cb)(int val, const char *optarg, int remote);
};
extern void slurm_error(const char *format, ...);

const char plugin_name[] = "pyxis", plugin_type[] = "spank";
const unsigned int plugin_version = SLURM_VERSION, spank_plugin_version = 1;

static char *image, *mounts, *workdir;

static int keep(int val, const char *arg, int remote)
{
    (void) remote;
    *(val == 0 ? &image : val == 1 ? &mounts : &workdir) = strdup(arg);
    return 0;
}

struct spank_option spank_options[] = {
    {"container-image", "IMAGE", "[pyxis] the image", 1, 0, keep},
    {"container-mounts", "SRC:DST[:FLAGS]", "[pyxis] bind mounts", 1, 1, keep},
    {"container-workdir", "PATH", "[pyxis] working directory", 1, 2, keep},
    {NULL, NULL, NULL, 0, 0, NULL},
};

static int bind_all(void)
{
    char *rest = strdup(mounts ? mounts : ""), *one;
    while ((one = strsep(&rest, ",")) && *one) {
        char *source = strsep(&one, ":"), *target = strsep(&one, ":");
        if (!target)
            return -1;
        mkdir(target, 0755);
        if (mount(source, target, NULL, MS_BIND | MS_REC, NULL))
            return -1;
        if (one && !strcmp(one, "ro") && mount(NULL, target, NULL, MS_BIND | MS_REMOUNT | MS_RDONLY, NULL))
            return -1;
    }
    return 0;
}

int slurm_spank_task_init_privileged(spank_t spank, int count, char **arguments)
{
    FILE *notes;
    (void) spank;
    if (!image)
        return 0;
    if (!strcmp(image, "missing")) {
        slurm_error("pyxis: failed to import docker image");
        return -1;
    }
    if (count && (notes = fopen(arguments[0], "a"))) {
        fprintf(notes, "%s|%s|%s\n", image, mounts ? mounts : "", workdir ? workdir : "");
        fclose(notes);
    }
    if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) || bind_all()) {
        slurm_error("pyxis: %m");
        return -1;
    }
    return 0;
}

int slurm_spank_task_init(spank_t spank, int count, char **arguments)
{
    (void) spank, (void) count, (void) arguments;
    return image && workdir ? chdir(workdir) : 0;
}
