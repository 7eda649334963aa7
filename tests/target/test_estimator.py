"""Estimators of scikit-learn, XGBoost and LightGBM, passed as they are."""

import re
import warnings

import numpy as np
import pytest
import torch

import themis
from themis import DataError, ModelError, UsageError

pandas = pytest.importorskip("pandas")
datasets = pytest.importorskip("sklearn.datasets")

from sklearn.compose import make_column_transformer  # noqa: E402
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier, RandomForestRegressor  # noqa: E402
from sklearn.linear_model import LogisticRegression, RidgeClassifier  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import OneHotEncoder, StandardScaler  # noqa: E402
from sklearn.tree import DecisionTreeClassifier  # noqa: E402


def table(names=("setosa", "versicolor", "virginica")):
    data = datasets.load_iris(as_frame=True)
    frame = data.frame.drop(columns="target")
    frame.columns = ["sepal_l", "sepal_w", "petal_l", "petal_w"]
    return frame.assign(label=[names[k] for k in data.target])


IRIS = table()
X, Y = IRIS.drop(columns="label"), IRIS["label"]


def run(target, data=IRIS, **options):
    return themis.run(target, data, "edit", **{"max_tests": 64, **options})


def by_column():
    scaled = make_column_transformer((StandardScaler(), ["petal_l"]), ("passthrough", ["petal_w"]))
    return make_pipeline(scaled, LogisticRegression())


ESTIMATORS = {
    "forest": (lambda: RandomForestClassifier(10, random_state=0), "predict_proba"),
    "pipeline": (by_column, "predict_proba"),
    "decision": (RidgeClassifier, "decision_function"),
}


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_an_estimator_is_tested_as_it_is(kind, tmp_path):
    make, method = ESTIMATORS[kind]
    model = make().fit(X, Y)
    result = run(model, out=tmp_path / "run")
    assert result.start.clean_accuracy == pytest.approx((model.predict(X) == Y).mean())
    assert result.start.classes == ("setosa", "versicolor", "virginica")
    assert result.start.entry == f"what {method} returns"
    assert result.start.bounds == pytest.approx((0.1, 7.9))
    assert themis.open_run(tmp_path / "run", model, IRIS).faults[0].replay().is_same
    assert themis.resume(tmp_path / "run", make().fit(X, Y), IRIS, max_tests=80).rounds[-1].tests == 80
    with pytest.raises(ModelError, match="the model must be the same as in the run"):
        themis.resume(tmp_path / "run", make().fit(X[20:], Y[20:]), IRIS, max_tests=90)


@pytest.mark.parametrize("names", [(1, 2, 5), (-1, 0, 1), (True, False, True), ("a", "b", "c")])
def test_labels_are_numbered_as_the_estimator_numbers_them(names):
    """Even if the data has only some of the classes."""
    frame = table(names)
    model = DecisionTreeClassifier(random_state=0).fit(frame.drop(columns="label"), frame["label"])
    assert run(model, frame).start.clean_accuracy == 1
    assert run(model, frame[60:]).start.clean_accuracy == 1


def test_labels_that_the_estimator_does_not_know_are_refused():
    model = RandomForestClassifier(5, random_state=0).fit(X, Y)
    with pytest.raises(
        DataError, match=r"trained on, 'setosa', 'versicolor', 'virginica', got 'rose': name the column"
    ):
        run(model, table(("setosa", "rose", "virginica")))


def test_a_regressor_answers_with_numbers():
    model = RandomForestRegressor(5, random_state=0).fit(X, np.arange(150.0))
    result = run(model, (X, np.arange(150.0)))
    assert result.start.oracle.startswith("regression")


def test_a_named_suite_leaves_out_what_needs_a_gradient(tmp_path):
    model = RandomForestClassifier(5, random_state=0).fit(X, Y)
    suite = themis.run_suite(model, IRIS, "tables", max_tests=200, out=tmp_path / "suite")
    assert [member["name"] for member in suite.record["members"]] == ["edit", "table_noise"]
    assert suite.record["notes"][0].startswith("Left out: perturbation 'edit_worst' needs the model's gradient")
    with pytest.raises(
        UsageError, match=r"none of its 4 fits: perturbation 'fgsm' needs the model's gradient .* square"
    ):
        themis.run_suite(model, IRIS, "attacks", max_tests=200, out=tmp_path / "attacks")


def test_options_go_to_the_black_box():
    model = RandomForestClassifier(5, random_state=0).fit(X, Y)
    result = run(themis.BlackBox(model, bounds=(0, 10), batch_size=8))
    assert result.start.bounds == (0, 10)
    assert result.requests["calls"] >= 150 / 8
    with pytest.raises(UsageError, match=r"pass it to themis.run as it is, or as themis.BlackBox\(estimator, ...\)"):
        themis.Target(model)
    with pytest.raises(UsageError, match="bounds must be given for inputs of shape"):
        themis.run(model, np.ones((5, 2, 2), np.float32), "gaussian")


def test_a_factory_may_return_an_estimator(tmp_path, monkeypatch, capsys):
    from themis.cli import main

    monkeypatch.chdir(tmp_path)
    IRIS.to_csv("iris.csv", index=False)
    (tmp_path / "tree_module.py").write_text(
        "import pandas\nfrom sklearn.tree import DecisionTreeClassifier\n"
        "def make():\n    frame = pandas.read_csv('iris.csv')\n"
        "    return DecisionTreeClassifier(random_state=0).fit(frame.drop(columns='label'), frame['label'])\n"
    )
    words = ["--model", "tree_module:make", "--data", "csv:iris.csv", "--perturb", "edit", "--bounds", "auto"]
    assert main(["run", *words, "--max-tests", "64", "--out", "run", "--no-report", "--quiet"]) == 0
    assert main(["replay", "run", str(themis.open_run("run").faults[0].id)]) == 0
    assert main(["run", *words, "--print-config"]) == 0
    assert "bounds: auto" in capsys.readouterr().out


def people(n=120):
    """Rows of names, booleans and missing values, with labels that depend on them."""
    draw = np.random.default_rng(0)
    frame = pandas.DataFrame(
        {
            "color": pandas.Series(draw.choice(np.array(["red", "green", None], object), n)),
            "size": pandas.Categorical(draw.choice(["S", "M"], n), categories=["S", "M", "L"]),
            "age": np.where(draw.random(n) < 0.1, np.nan, draw.integers(18, 80, n)),
            "member": draw.random(n) < 0.5,
        }
    )
    is_young = frame["age"].fillna(0) < 40
    return frame, np.where((frame["color"] == "red") & is_young | (frame["size"] == "M"), "yes", "no")


def encoding():
    encoder = make_column_transformer((OneHotEncoder(), ["color", "size", "member"]), ("passthrough", ["age"]))
    return make_pipeline(encoder, HistGradientBoostingClassifier(max_iter=10, min_samples_leaf=2))


def test_a_pipeline_that_encodes_names_is_tested_as_it_is(tmp_path, capsys):
    frame, labels = people()
    model = encoding().fit(frame, labels)
    result = run(model, (frame, labels), out=tmp_path / "run", max_tests=300)
    assert result.start.clean_accuracy == pytest.approx((model.predict(frame) == labels).mean())
    assert all(fault.replay().is_same for fault in result.faults.most_telling(5))
    opened = themis.open_run(tmp_path / "run", model, (frame, labels))
    assert opened.faults[0].replay().is_same
    assert themis.resume(tmp_path / "run", model, (frame, labels), max_tests=320).rounds[-1].tests == 320
    others = frame.replace({"color": {"green": "blue"}})
    with pytest.raises(DataError, match="the table's features must be the same as in the run"):
        themis.resume(tmp_path / "run", model, (others, labels), max_tests=340)


def test_the_changes_of_a_fault_are_shown_by_name(tmp_path, capsys):
    from themis.cli import main

    frame, labels = people()
    fixed = themis.Features.of(frame).set("*", change="fixed").set("color", change="any")
    result = run(encoding().fit(frame, labels), (frame, labels), features=fixed, out=tmp_path / "run", max_tests=200)
    assert main(["faults", str(tmp_path / "run"), str(result.faults.most_telling(1)[0].id)]) == 0
    shown = capsys.readouterr().out
    assert "1 of 5 features changed" in shown
    assert re.search(r"color  (red|green|missing) -> (red|green|missing)", shown)


def test_a_function_gets_a_data_frame_of_names():
    frame, labels = people()

    def predict(rows):
        is_red = (rows["color"] == "red").to_numpy()
        assert [str(kind) for kind in rows.dtypes] == [str(kind) for kind in frame.dtypes]
        return np.stack([~is_red, is_red], 1).astype(np.float32)

    labels = np.where(frame["color"] == "red", "yes", "no")
    result = run(themis.BlackBox(predict, bounds=(0, 100)), (frame, labels))
    assert len(result.faults) > 0


def test_models_of_tensors_refuse_names_and_estimators_other_columns():
    frame, labels = people()
    with pytest.raises(DataError, match=r"column 'color' must be numbers for a model that .* 'green': name"):
        run(torch.nn.Linear(5, 2), (frame, labels))
    numbers = frame[["age", "member"]]
    with pytest.raises(DataError, match=r"column 'age' must be numbers .* missing values"):
        run(torch.nn.Linear(3, 2), (numbers, labels))
    model = encoding().fit(frame, labels)
    with pytest.raises(ModelError, match=r"fitted to, missing \[\], unexpected \['more'\]: drop a column"):
        run(model, (frame.assign(more=1), labels))


BOOSTED = [
    ("xgboost", "XGBClassifier", "estimator"),
    ("xgboost", "XGBClassifier", "booster"),
    ("lightgbm", "LGBMClassifier", "estimator"),
    ("lightgbm", "LGBMClassifier", "booster"),
]


@pytest.mark.parametrize(("library", "classifier", "form"), BOOSTED)
def test_boosted_trees_get_their_own_categories(library, classifier, form):
    frame, labels = people()
    frame, numbers = frame.astype({"color": "category"}), (labels == "yes").astype(int)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"enable_categorical": True} if library == "xgboost" else {"verbose": -1}
        model = boosted(library, classifier).set_params(**options).fit(frame, numbers)
        accuracy = (model.predict(frame) == numbers).mean()
        if form == "booster":
            model = model.get_booster() if library == "xgboost" else model.booster_
        result = run(model, (frame, numbers))
    assert result.start.clean_accuracy == pytest.approx(accuracy)
    assert result.faults[0].replay().is_same


def boosted(library, classifier):
    return getattr(pytest.importorskip(library), classifier)(n_estimators=5, max_depth=2, n_jobs=1)


@pytest.mark.parametrize(("library", "classifier", "form"), BOOSTED)
def test_boosted_trees_are_tested_as_they_are(library, classifier, form):
    numbers = datasets.load_iris().target
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the libraries say of their own dependencies
        model = boosted(library, classifier).fit(X.to_numpy(np.float32), numbers)
        accuracy = (model.predict(X.to_numpy(np.float32)) == numbers).mean()
        if form == "booster":
            model = model.get_booster() if library == "xgboost" else model.booster_
        result = run(model, (X, numbers))
    assert result.start.clean_accuracy == pytest.approx(accuracy)
    assert result.faults[0].replay().is_same
