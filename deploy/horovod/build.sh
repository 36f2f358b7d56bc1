#!/bin/sh
# Horovod for the torch of an environment, built from its sources: the last release knows neither
# today's C++ standard nor today's torch. About ten minutes of one core; the wheel is kept.
#
#   deploy/horovod/build.sh PYTHON FOLDER     → FOLDER/horovod-….whl
set -eu

python=$(realpath -s "$1")
mkdir -p "$2"
folder=$(realpath "$2")
version=0.28.1

if ls "$folder"/horovod-*.whl >/dev/null 2>&1; then
    exit 0
fi

# an environment of its own for the old build tools, which sees the torch of the other one
"$python" -m venv "$folder/tools"
site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
own=$("$folder/tools/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
echo "$site" >"$own/torch.pth"
"$folder/tools/bin/python" -m pip install --quiet 'setuptools<81' wheel cloudpickle psutil pyyaml packaging cffi

cd "$folder"
"$folder/tools/bin/python" -m pip download --quiet --no-deps --no-build-isolation --no-binary :all: "horovod==$version"
rm -rf "horovod-$version"
tar xzf "horovod-$version.tar.gz"
cd "horovod-$version"

# torch's headers need C++20, and the gloo inside needs 17
sed -i 's/CMAKE_CXX_STANDARD 14/CMAKE_CXX_STANDARD 20/' CMakeLists.txt horovod/torch/CMakeLists.txt
sed -i 's/-std=c++11/-std=c++17/' third_party/gloo/CMakeLists.txt

export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
export HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_GPU="${HOROVOD_WITHOUT_GPU-1}"
MAKEFLAGS="${MAKEFLAGS:--j2}" PATH="$folder/tools/bin:$PATH" "$folder/tools/bin/python" setup.py --quiet bdist_wheel
cp dist/horovod-*.whl "$folder/"
