from longtail.errors import UserError


def test_a_message_keeps_both_ends_whatever_it_quotes():
    said = str(UserError(f"prior.csv, line 3: found {'x' * 10_000}; write class,weight"))
    assert said.startswith("prior.csv, line 3: found xxx")
    assert said.endswith("xxx; write class,weight")
    assert len(said) == 1203
    assert str(UserError("y" * 1200)) == "y" * 1200
