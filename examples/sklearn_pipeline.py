"""A scikit-learn pipeline that knows of the long tail: CalibratedLongTail around a classifier, gamma by grid search.

python examples/sklearn_pipeline.py
"""

from dataclasses import replace

from sklearn.linear_model import LogisticRegression
from sklearn.metrics import recall_score
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import longtail
from longtail.sklearn import CalibratedLongTail

data = longtail.data.open_splits(
    replace(longtail.RECIPES["digits-lt"], imbalance=10)
)  # 103 of the 0 down to 10 of the 9
train, test = ((split.pixels.flatten(1).numpy(), split.labels.numpy()) for split in (data.train, data.test))

plain = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=1000))
calibrated = CalibratedLongTail(plain, longtail.MARC(), cv=3)
search = GridSearchCV(calibrated, {"method__gamma": [0.0, 0.6, 1.2]}, scoring="balanced_accuracy", cv=3)

for title, model in (("plain", plain), ("calibrated", search)):
    recalls = recall_score(test[1], model.fit(*train).predict(test[0]), average=None)
    print(f"{title}: balanced {100 * recalls.mean():.1f}, last three digits {100 * recalls[7:].mean():.1f}")
print("chosen", search.best_params_)
