#!/bin/bash
# SPDX-License-Identifier: BSD-3-Clause
#
# build.sh FOLDER: makes FOLDER with kube-apiserver and kube-controller-manager 1.20.2 and etcd 3.4, from the archive of
# Debian 12 alone. Nothing is installed. Takes two to five minutes, 150 MB of downloads and 2 GB on the disk meanwhile.
#
# Debian packs no server since Debian 11, but still holds the source, of which the orig tarball carries all it imports.
# It is compiled by a Go that is newer than it knows: reflect2 1.0.1 in it reads maps as they were before Go 1.18, and
# crashes; Debian's 1.0.2 takes its place.
set -euo pipefail
goal=$1
mkdir -p "$(dirname "$goal")"
work=$(mktemp -d "$goal.XXXXXX")
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
cd "$work"
mkdir -p lists/partial cache/archives/partial packages root tree/src/k8s.io/kubernetes out

# The system's mirror and keys, its package lists untouched.
mirror=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null |
	sed -nE 's/^(URIs:|deb( \[[^]]*\])?) *([^ ]+).*/\3/p' | grep -E '/debian/?$' | head -1 || true)
keys=/usr/share/keyrings/debian-archive-keyring.gpg
[ -n "$mirror" ] && [ -r "$keys" ] || { echo "this is no Debian, or /etc/apt names no mirror of it" >&2; exit 1; }
printf "deb%s [signed-by=$keys] $mirror bookworm main\n" "" -src >sources.list
apt=(-q -o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=/dev/null -o "Dir::State::lists=$work/lists"
	-o "Dir::Cache=$work/cache" -o APT::Sandbox::User=root)
apt-get "${apt[@]}" update
cd packages
apt-get "${apt[@]}" download golang-1.19-go golang-1.19-src golang-github-modern-go-reflect2-dev etcd-server
apt-get "${apt[@]}" source --download-only --tar-only kubernetes
for package in *.deb; do
	dpkg -x "$package" ../root
done

source=$work/tree/src/k8s.io/kubernetes
tar -xf kubernetes_*.orig.tar.gz --strip-components=1 -C "$source"
cd "$source"
reflect=vendor/github.com/modern-go/reflect2
rm -r "$reflect"
cp -rL "$work/root/usr/share/gocode/src/github.com/modern-go/reflect2" "$reflect"
# What the tarball says of its version is v0.0.0.
sed -i -E 's/^(\tgitMajor string)/\1 = "1"/; s/^(\tgitMinor string)/\1 = "20"/; s/^(\tgitVersion += ).*/\1"v1.20.2"/' \
	staging/src/k8s.io/component-base/version/base.go

export GOROOT=$work/root/usr/lib/go-1.19 GOPATH=$work/tree GOCACHE=$work/gocache
export GO111MODULE=off GOFLAGS= GOPROXY=off CGO_ENABLED=0 PATH=$work/root/usr/lib/go-1.19/bin:$PATH
# The compiler takes two thirds of the processor time when it inlines nothing, writes no symbols for a debugger and collects
# less garbage; the programs take about as much as with all of it.
export GOGC=400
flags=(-gcflags='all=-l -dwarf=false')

# The OpenAPI definitions, without which the server does not start, are made at every build: of the packages that ask.
asking=$(grep -rlE '^// *\+k8s:openapi-gen=' --include=*.go staging/src/k8s.io pkg cmd |
	grep -vE 'example|testdata|/code-generator/|_test\.go|sample-' | xargs -n1 dirname |
	sed -e 's#^staging/src/#k8s.io/kubernetes/vendor/#' -e 's#^\(pkg\|cmd\)/#k8s.io/kubernetes/\1/#' | sort -u | paste -sd,)
go run "${flags[@]}" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen --go-header-file hack/boilerplate/boilerplate.generatego.txt \
	-i "$asking" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi -o "$GOPATH/src" -r "$work/violations"

# Without the clouds' own drivers, which are half of it.
go build "${flags[@]}" -tags providerless,dockerless -ldflags '-s -w' -o "$work/out/" ./cmd/kube-apiserver ./cmd/kube-controller-manager
cp "$work/root/usr/bin/etcd" "$work/out/"
"$work/out/kube-apiserver" --version
# Where somebody else was first, theirs is as good.
mv -T "$work/out" "$goal" 2>/dev/null || [ -x "$goal/kube-apiserver" ]
