# SPDX-License-Identifier: MIT
"""check_symbols.py SHARED STATIC - what the libraries export, need and call, read with nm, readelf and size; also of
libnormfuse_onnxruntime.so beside SHARED."""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEADER = ROOT / "include/normfuse.h"
# Functions that the Python package calls beside it.
HANDLERS = [ROOT / "src/package.h", ROOT / "src/bindings/torch.h", ROOT / "src/bindings/xla.h"]
# libc's own parts: older glibc keeps threads and the dynamic linker's entry points in libraries of their own.
LIBC = re.compile(r"^(libc\.so|libm\.so|libpthread\.so|libdl\.so|ld-linux[-a-z0-9]*\.so)")
# A library neither ends its caller's process nor writes to its standard output.
FORBIDDEN = {"abort", "exit", "_exit", "_Exit", "quick_exit", "raise", "__assert_fail", "printf", "puts", "putchar",
             "__printf_chk"}
# Norm over channels has 160 KB of it: two layouts of each dtype, for each instruction set.
TEXT_LIMIT = 1792 * 1024
# The text of the CUDA kernels, which are compiled at run time.
DEVICE_TEXT_LIMIT = 256 * 1024
# libnormfuse_onnxruntime.so, which has no kernels.
ONNXRUNTIME_LIMIT = 24 * 1024

counts = [0, 0]


def tool(*command):
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def check(rule, offenders):
    counts[bool(offenders)] += 1
    if offenders:
        print(f"FAIL {rule}: {', '.join(sorted(offenders)[:20])}")


def symbols(library, *options):
    rows = (line.split() for line in tool("nm", *options, library).splitlines())
    return [(row[-2], row[-1].split("@")[0]) for row in rows if len(row) >= 2 and len(row[-2]) == 1]


shared, static = sys.argv[1:]
declared = set(re.findall(r"\b(normfuse_\w+)\(", "".join(
    re.findall(r"^NORMFUSE_API[^;]*;", "".join(path.read_text() for path in (HEADER, *HANDLERS)), re.M))))
dynamic = symbols(shared, "-D")
exported = {name for kind, name in dynamic if kind not in "Uwv"}
undefined = {name for kind, name in dynamic if kind in "Uwv"}
archive = symbols(static, "-g")

check("the shared library exports only normfuse_*", {name for name in exported if not name.startswith("normfuse_")})
check("the shared library exports what the headers declare", declared - exported)
check("the shared library exports nothing that the headers do not declare", exported - declared)
check("every global symbol of the static library starts with normfuse_",
      {name for kind, name in archive if kind not in "Uwv" and not name.startswith("normfuse_")})
check("the libraries do not end the process nor print to standard output",
      ({name for kind, name in archive if kind == "U"} | undefined) & FORBIDDEN)
needed = re.findall(r"\(NEEDED\).*\[(.*)\]", tool("readelf", "-d", "-W", shared))
check("the shared library needs libc and libm only", {name for name in needed if not LIBC.match(name)})
soname = re.findall(r"\(SONAME\).*\[(.*)\]", tool("readelf", "-d", "-W", shared))
major, minor = (re.search(rf"NORMFUSE_VERSION_{part} (\d+)", HEADER.read_text()).group(1)
                for part in ("MAJOR", "MINOR"))
check("the soname carries what may break the interface: the major version, before 1.0 the minor one too",
      set() if soname == [f"libnormfuse.so.{major}" + (f".{minor}" if major == "0" else "")] else {str(soname)})
check("the shared library is never unloaded, since its threads do not end",
      set() if "NODELETE" in tool("readelf", "-d", "-W", shared) else {"no NODELETE"})
check("no executable stack, no text relocations",
      {word for word in ("RWE", "TEXTREL") if word in tool("readelf", "-l", "-d", "-W", shared)})
text_bytes = int(tool("size", shared).splitlines()[1].split()[0])
sections = dict(line.split()[:2] for line in tool("size", "-A", shared).splitlines() if line.startswith("."))
device_bytes = int(sections.get(".device_text", 0))
text_bytes -= device_bytes  # size counts every read-only section as text
check(f"text is under {TEXT_LIMIT} bytes", {f"{text_bytes} bytes"} if text_bytes >= TEXT_LIMIT else set())
check(f"the text of the CUDA kernels is under {DEVICE_TEXT_LIMIT} bytes",
      {f"{device_bytes} bytes"} if device_bytes >= DEVICE_TEXT_LIMIT else set())

custom = pathlib.Path(shared).with_name("libnormfuse_onnxruntime.so")
dynamic = symbols(custom, "-D")
undefined = {name for kind, name in dynamic if kind in "Uwv"}
header = tool("readelf", "-l", "-d", "-W", custom)
needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", header))
check(f"{custom.name} exports RegisterCustomOps only", {name for kind, name in dynamic if kind not in "Uwv"} ^
      {"RegisterCustomOps"})
check(f"{custom.name} does not end the process nor print to standard output", undefined & FORBIDDEN)
check(f"{custom.name} needs {shared} and libc only", {name for name in needed if not LIBC.match(name)} ^ set(soname))
check(f"{custom.name} calls what the headers declare", {name for name in undefined if name.startswith("normfuse_")} -
      declared)
check(f"{custom.name} finds libnormfuse.so beside itself", set() if "[$ORIGIN]" in header else {"no RUNPATH $ORIGIN"})
check(f"{custom.name} is never unloaded, since sessions point into it",
      set() if "NODELETE" in header else {"no NODELETE"})
check(f"{custom.name}: no executable stack, no text relocations",
      {word for word in ("RWE", "TEXTREL") if word in header})
custom_bytes = int(tool("size", custom).splitlines()[1].split()[0])
check(f"{custom.name}: text is under {ONNXRUNTIME_LIMIT} bytes", {f"{custom_bytes} bytes"}
      if custom_bytes >= ONNXRUNTIME_LIMIT else set())

print(f"text: {text_bytes} bytes, {custom.name} {custom_bytes}; text of the CUDA kernels: {device_bytes} bytes; {len(exported)} exported functions")
print(f"{counts[0]} passed, {counts[1]} failed, 0 skipped")
sys.exit(counts[1] > 0)
