"""Tables that a user brings: what is read, under which names, and every fault with its place."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rocktokens.errors import DataError
from rocktokens.interop.measured import read_counts

COUNTS = "token_id,count,mean_loss\n7,100,0.5\n3,400,0.1\n9,10,2.0\n"


def csv(tmp_path, text, name="table.csv"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_counts_are_read_from_csv_and_parquet_alike(tmp_path):
    one = read_counts(csv(tmp_path, COUNTS))
    path = tmp_path / "table.parquet"
    pq.write_table(pa.table({"token_id": [7, 3, 9], "count": [100, 400, 10], "mean_loss": [0.5, 0.1, 2.0]}), path)
    two = read_counts(path)
    np.testing.assert_array_equal(one.token_id_V, [7, 3, 9])
    np.testing.assert_allclose(one.burden_V, [50.0, 40.0, 20.0])
    for name in ("token_id_V", "count_V", "mean_loss_V"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))


@pytest.mark.parametrize("header", ["Token ID,Frequency,Mean Loss", "token-id,freq,mean_kl", "id,count,kl"])
def test_columns_go_by_several_names(tmp_path, header):
    read = read_counts(csv(tmp_path, COUNTS.replace("token_id,count,mean_loss", header)))
    assert read.count_V.tolist() == [100, 400, 10]


def test_texts_come_along_even_with_line_breaks_in_them(tmp_path):
    read = read_counts(csv(tmp_path, 'token_id,count,mean_loss,token\n1,2,0.5,"a\n\nb"\n2,2,0.5,"x, y"\n'))
    assert read.tokens == ("a\n\nb", "x, y")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("token_id,count\n1,2\n", "has no column mean_loss"),
        ("token_id,mean_loss\n1,0.2\n", "no column count (or frequency, freq). It has: 'token_id', 'mean_loss'"),
        (COUNTS.replace("400", "-400"), "row 2: count is -400; a count is never negative"),
        (COUNTS.replace("400", "4.5"), "row 2: count is 4.5; it must be a whole number"),
        (COUNTS.replace("400", "many"), "column count must hold numbers"),
        (COUNTS.replace("0.1", "nan"), "row 2: mean_loss is nan; it must be a finite number"),
        (COUNTS.replace("0.1", ""), "row 2: mean_loss is nan"),
        (COUNTS.replace("0.1", "inf"), "row 2: mean_loss is inf"),
        (COUNTS.replace("0.1", "-0.1"), "row 2: mean_loss is -0.1; a KL divergence is never negative"),
        (COUNTS.replace("\n3,", "\n7,"), "row 2: token_id 7 stands in row 1 already"),
        (COUNTS.replace("\n3,", "\n-3,"), "row 2: token_id is -3"),
        ("token_id,count,mean_loss\n", "holds no rows"),
        ("token_id,count,mean_loss\n1,0,0.5\n", "every count is 0"),
        ("", "cannot be read as CSV"),
        (COUNTS.replace("400", "9" * 400), "count"),
        (COUNTS.replace("400", "1e300"), "row 2: count is 1e+300; it must be a whole number, below 2^53"),
        ("token_id,count,count,mean_loss\n1,2,3,0.5\n", "has several columns count"),
        ("token_id,count,mean_loss\n1,1000,1e306\n", "add up to more than"),
        ("token_id,count,mean_loss\n1,1,1e308\n2,1,1e308\n", "add up to more than"),
        ("token_id,count,loss\n1,2,0.5\n", "no column mean_loss (or mean_kl, kl). It has: 'token_id', 'count', 'loss'"),
    ],
)
def test_bad_counts_are_refused_by_place(tmp_path, text, said):
    with pytest.raises(DataError) as caught:
        read_counts(csv(tmp_path, text))
    assert said in str(caught.value)


def test_a_mean_log_ratio_may_be_negative_where_it_is_asked_for(tmp_path):
    read = read_counts(csv(tmp_path, COUNTS.replace("0.1", "-0.1")), signed=True)
    assert read.mean_loss_V.tolist() == [0.5, -0.1, 2.0]


def test_files_that_are_not_there_or_no_tables(tmp_path):
    with pytest.raises(DataError, match="there is no file"):
        read_counts(tmp_path / "none.csv")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        read_counts(csv(tmp_path, COUNTS, "table.parquet"))
