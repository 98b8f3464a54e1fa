#!/usr/bin/env bash
# llama.cpp's programs on x86-64 Linux without compiling, from Debian's packages: for benchmarks and checks.
#
#     bash benchmarks/llama_cpp.sh build/llama.cpp
#     build/llama.cpp/run llama-perplexity --version
#
# Needs apt and a Debian mirror among its sources, which is asked for the newest build (`sid`). Nothing is installed:
# packages are unpacked below the folder, with the C library that they were linked with. `run` starts a program by that
# library's own loader, and names it the CPU backend for this processor, since ggml would look in the system's folders.
set -euo pipefail

folder=$(realpath -m "${1:?give a folder}")
packages=(llama.cpp-tools llama.cpp-tools-extra libllama0 libggml0)
libraries=(libc6 libgcc-s1 libstdc++6 libgomp1 libssl3t64 zlib1g libzstd1)

if [ -x "$folder/run" ]; then
    echo "$folder is there already"
    exit
fi

# An apt with lists and a cache of its own, which reads the system's first source at another release.
mirror=$(apt-get indextargets --format '$(REPO_URI)' | grep -v security | sort -u | head -n 1)
if [ -z "$mirror" ]; then
    echo "llama_cpp.sh: apt knows no Debian source; add one, or put llama.cpp's programs on PATH" >&2
    exit 2
fi
mkdir -p "$folder"/{lists/partial,cache/archives/partial,packages,root}
echo "deb $mirror sid main" >"$folder/sources.list"
own=(-qq -o "Dir::Etc::SourceList=$folder/sources.list" -o "Dir::Etc::SourceParts=-")
own+=(-o "Dir::State::Lists=$folder/lists" -o "Dir::Cache=$folder/cache" -o "APT::Sandbox::User=root")
apt-get "${own[@]}" update
(cd "$folder/packages" && apt-get "${own[@]}" download "${packages[@]}" "${libraries[@]}")
for package in "$folder"/packages/*.deb; do
    dpkg-deb -x "$package" "$folder/root"
done
rm -r "$folder/sources.list" "$folder/lists" "$folder/cache"

# The backend with the most of this processor's instructions.
libs=$folder/root/usr/lib/x86_64-linux-gnu
backends=$libs/ggml/backends0
backend=haswell
for pair in avx512_vnni:icelake avx512_bf16:zen4 amx_int8:sapphirerapids; do
    if grep -qw "${pair%:*}" /proc/cpuinfo && [ -e "$backends/libggml-cpu-${pair#*:}.so" ]; then
        backend=${pair#*:}
    fi
done

cat >"$folder/run.new" <<EOF
#!/bin/sh
# run PROGRAM ARGUMENTS ...
program=$folder/root/usr/bin/\$1
shift
: "\${GGML_BACKEND_PATH:=$backends/libggml-cpu-$backend.so}"
export GGML_BACKEND_PATH
exec "$libs/ld-linux-x86-64.so.2" --library-path "$libs:$libs/llama:$libs/ggml:$backends" "\$program" "\$@"
EOF
chmod +x "$folder/run.new"
mv "$folder/run.new" "$folder/run"
"$folder/run" llama-perplexity --version 2>&1 | head -n 1
