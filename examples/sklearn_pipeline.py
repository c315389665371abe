"""A scikit-learn pipeline on an imbalanced table: CalibratedLongTail around it, tau by grid search.

The table is scikit-learn's breast cancer data with 11 malignant of 225 training tumours left. The plain pipeline misses
one in five of the malignant ones; the calibrated one finds nearly all, for some false alarms. Both order the tumours
alike (the same average precision): logit adjustment moves the threshold, and tau says how far.

    python examples/sklearn_pipeline.py
"""

import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, confusion_matrix
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import longtail
from longtail.sklearn import CalibratedLongTail

table, benign = load_breast_cancer(return_X_y=True)
malignant = 1 - benign
X, X_test, y, y_test = train_test_split(table, malignant, test_size=0.4, stratify=malignant, random_state=0)
rows = np.concatenate([np.flatnonzero(y == 0), np.flatnonzero(y == 1)[:11]])

plain = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=1000))
calibrated = CalibratedLongTail(plain, longtail.posthoc.LogitAdjustment(), cv=5)
search = GridSearchCV(calibrated, {"method__tau": [0.0, 0.5, 1.0]}, scoring="balanced_accuracy", cv=5)

for title, model in (("plain", plain), ("calibrated", search)):
    model.fit(X[rows], y[rows])
    (right, false_alarms), (missed, found) = confusion_matrix(y_test, model.predict(X_test))
    recalls = right / (right + false_alarms), found / (found + missed)
    print(f"{title}: balanced {100 * np.mean(recalls):.1f}, malignant {100 * recalls[1]:.1f}")
    precision = average_precision_score(y_test, model.predict_proba(X_test)[:, 1])
    print(f"    {missed} missed, {false_alarms} false alarms, average precision {precision:.3f}")
print("chosen", search.best_params_)
