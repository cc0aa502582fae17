"""What a program may try to pass tests that it does not solve: name -> a program whose `double` must pass none."""

ALL_EQUAL = "\n  def __eq__(self, o): return True\ndef double(x): return A()"
FORGED = "b'{\"done\": [null, null, null]}\\n'"
TRICKS = {
    "exits with 0 at once": "import sys; sys.exit(0)",
    "exits with 0 when it is called": "import os\ndef double(x): os._exit(0)",
    "returns what is equal to all": "class A(int):" + ALL_EQUAL,
    "returns a list that is equal to all": "class A(list):" + ALL_EQUAL,
    "changes what is built in": """
import builtins
builtins.AssertionError = int
builtins.all = lambda *_: True
def double(x): return 0
""",
    "defines names of the tests": "def check(f): pass\ndef isinstance(*_): return True\ndef double(x): return 0",
    "catches the tests' errors": "import sys\nsys.excepthook = lambda *_: None\ndef double(x): return 0",
    "looks into the frames above": """
import sys
def double(x):
    frame = sys._getframe()
    while frame:
        for value in frame.f_locals.values():
            if "assert" in str(value) and "== 4" in str(value): return 4
        frame = frame.f_back
    return 0
""",
    "looks through all objects": """
import gc
def double(x):
    needle = "".join(("assert ", "double("))
    for o in gc.get_objects():
        for text in (list(o.values()) if type(o) is dict else o if type(o) in (list, tuple) else ()):
            if type(text) is str and text.startswith(needle) and text != needle: return 4
    return 0
""",
    "reads files for the tests": """
import os
def double(x):
    for folder, _, names in os.walk("/tmp"):
        for name in names:
            if "assert" in open(os.path.join(folder, name)).read(): return 4
    return 0
""",
    "reads the memory of others": "def double(x): return 4 if open('/proc/1/mem', 'rb').read(9) else 0",
    "writes the verdict itself": f"""
import os
for i in range(3, 64):
    try: os.write(i, {FORGED})
    except OSError: pass
def double(x): return 0
""",
    "prints what passing prints": "print('PASSED')\nprint('{\"done\": [null]}')\ndef double(x): return 0",
    "answers for a call that does not end": """
import os
def double(x):
    for i in range(3, 64):
        try: os.write(i, b'{"value": 0}\\n')
        except OSError: pass
    while True: pass
""",
    "leaves a process that goes on": """
import os, time
if os.fork() == 0:
    while True: time.sleep(0.01)
def double(x): return 0
""",
    "raises the error that ends a loop": "def double(x): raise StopIteration",
    "raises what ends a program": "def double(x): raise SystemExit(0)",
    "raises what a user sends": "def double(x): raise KeyboardInterrupt",
    "returns what is no plain data": "def double(x): return double",
    "returns a very deep value": "def double(x):\n  v = []\n  for _ in range(900): v = [v]\n  return v",
    "returns a very long value": "def double(x): return 'x' * (10 << 20)",
}
