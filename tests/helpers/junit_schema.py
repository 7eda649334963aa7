"""The rules of the two schemas of JUnit XML that CI systems go by: Ant's (JUnit.xsd) and Jenkins's (junit-10.xsd).

A file must keep both: Ant's has the stricter order and attributes, Jenkins's the stricter times. `complaints` reads a
file and lists what breaks a rule.
"""

import re
from xml.etree import ElementTree

TEXT, NAME, COUNT = ".*", ".+", "[0-9]+"
TIME = r"[0-9]+(\.[0-9]{1,3})?"
STAMP = "[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}"
REQUIRED = {
    "testsuites": {},
    "testsuite": {
        **{"package": TEXT, "id": COUNT, "name": NAME, "timestamp": STAMP, "hostname": NAME},
        **{"tests": COUNT, "failures": COUNT, "errors": COUNT, "time": TIME},
    },
    "properties": {},
    "property": {"name": NAME, "value": TEXT},
    "testcase": {"name": NAME, "classname": NAME, "time": TIME},
    "failure": {"type": NAME},
    "error": {"type": NAME},
    "skipped": {},
    "system-out": {},
    "system-err": {},
}
OPTIONAL = {
    "testsuites": {"name": TEXT, "time": TIME, "tests": COUNT, "failures": COUNT, "errors": COUNT},
    "testsuite": {"skipped": COUNT},
    "failure": {"message": TEXT},
    "error": {"message": TEXT},
    "skipped": {"message": TEXT},
}
CHILDREN = {
    "testsuites": "(testsuite )*",
    "testsuite": "properties (testcase )*system-out system-err ",
    "properties": "(property )*",
    "testcase": "((skipped|error|failure) )?",
}
"""The children of an element in order, each with a space after it; others have none."""


def complaints(path):
    """What in a file breaks the rules, a line each."""
    root = ElementTree.parse(path).getroot()
    found = [] if root.tag == "testsuites" else [f"the root is {root.tag}"]
    for element in root.iter():
        found += _attributes(element)
        order = "".join(f"{child.tag} " for child in element)
        if not re.fullmatch(CHILDREN.get(element.tag, ""), order):
            found.append(f"{element.tag} has the children {order}")
    found += [line for suite in root.iter("testsuite") for line in _counts(suite)]
    ids = [suite.get("id") for suite in root.iter("testsuite")]
    return found + ([] if ids == [str(k) for k in range(len(ids))] else [f"suites have the ids {ids}"])


def _attributes(element):
    required = REQUIRED.get(element.tag)
    if required is None:
        return [f"{element.tag} is no element of the schemas"]
    allowed = {**required, **OPTIONAL.get(element.tag, {})}
    missing = [f"{element.tag} lacks {name}" for name in required if name not in element.attrib]
    return missing + [
        f"{element.tag} has {name}={value!r}"
        for name, value in element.attrib.items()
        if name not in allowed or not re.fullmatch(allowed[name], value, re.DOTALL)
    ]


def _counts(suite):
    """Counts and times that do not add up, and cases that cannot be told apart."""
    cases = list(suite.iter("testcase"))
    counted = {"tests": len(cases), "failures": len(suite.findall("testcase/failure"))}
    counted |= {"errors": len(suite.findall("testcase/error")), "skipped": len(suite.findall("testcase/skipped"))}
    found = [
        f"{name} is {suite.get(name)}, there are {n}" for name, n in counted.items() if suite.get(name, "0") != str(n)
    ]
    if abs(sum(float(case.get("time")) for case in cases) - float(suite.get("time"))) > 0.001 * max(1, len(cases)):
        found.append(f"the cases' times do not add up to {suite.get('time')}")
    names = [(case.get("classname"), case.get("name")) for case in cases]
    return found + ([] if len(set(names)) == len(names) else [f"two cases have one name: {names}"])
