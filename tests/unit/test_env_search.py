"""The tool `search` over real indexes and a real server."""

import json
import math
import re
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("bm25s")

from spmdrl.env import search as corpora
from spmdrl.env.play import Play
from spmdrl.env.search import Search, SearchError, open_corpus

ROWS = [
    {"id": "1", "title": "Paris", "text": "Paris is the capital of France. The Seine flows through Paris."},
    {"id": "2", "title": "Rome", "text": "Rome is the capital of Italy."},
    {"id": "3", "contents": '"Zürich"\nZürich lies on a lake in Switzerland. 漢字'},
    {"id": "4", "contents": "Rivers of France: Seine, Loire, Rhone, Garonne."},
    {"id": "5", "text": "Cats sleep. " * 400},
]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS) + "\n", encoding="utf-8")
    return path


def test_passages_are_shown_with_titles(file, tmp_path):
    tool = Search(corpus=str(file), cache=str(tmp_path / "cache"), results=2)
    assert tool.search("capital of France") == (
        "[1] Paris\nParis is the capital of France. The Seine flows through Paris.\n\n"
        "[2] Rome\nRome is the capital of Italy."
    )
    assert tool.search("ZÜRICH lake?") == "[1] Zürich\nZürich lies on a lake in Switzerland. 漢字"
    assert tool.search("Loire").startswith("[1] Rivers of France")
    assert tool.search("the of") == tool.search("zebra") == "Nothing was found."
    assert tool.search("cats") == "[1] " + ("Cats sleep. " * 400)[:2000] + " ..."
    with pytest.raises(ValueError, match="the query is empty"):
        tool.search("  ")
    assert tool.reset({}, 0) is None
    tool.restore(tool.state())


def test_the_order_is_that_of_bm25(tmp_path):
    """Lucene's form of BM25 with k1 = 1.5 and b = 0.75, written out."""
    texts = ["red cat", "red red dog", "blue cat cat dog", "green bird bird bird bird", "red bird", "fish"]
    path = tmp_path / "c.txt"
    path.write_text("\n\n".join(texts), encoding="utf-8")
    found = open_corpus(str(path), str(tmp_path / "cache"))
    words = [re.findall(r"\w\w+", text) for text in texts]
    mean = sum(map(len, words)) / len(words)

    def score(query: str, passage: list[str]) -> float:
        total = 0.0
        for word in query.split():
            having = sum(word in each for each in words)
            idf = math.log(1 + (len(words) - having + 0.5) / (having + 0.5))
            count = passage.count(word)
            total += idf * count / (count + 1.5 * (0.25 + 0.75 * len(passage) / mean))
        return total

    for query in ("red dog", "cat bird", "bird", "fish red"):
        scores = [score(query, passage) for passage in words]
        wanted = [texts[i] for i in sorted(range(len(texts)), key=lambda i: -scores[i]) if scores[i] > 0][:4]
        assert [each.text for each in found.search(query, 4)] == wanted


def test_an_index_is_built_once_and_anew_when_the_file_changes(file, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    first = open_corpus(str(file), str(cache))
    (folder,) = [each for each in cache.iterdir() if each.is_dir()]
    built = (folder / "complete").stat().st_mtime_ns
    assert open_corpus(str(file), str(cache)) is first
    monkeypatch.setattr(corpora, "_open", {})
    again = open_corpus(str(file), str(cache))
    assert again is not first and (folder / "complete").stat().st_mtime_ns == built
    assert [each.title for each in again.search("Italy", 3)] == ["Rome"]
    file.write_text(json.dumps({"text": "Oslo is the capital of Norway"}) + "\n", encoding="utf-8")
    assert open_corpus(str(file), str(cache)).search("Norway", 3)[0].text.startswith("Oslo")
    assert len([each for each in cache.iterdir() if each.is_dir()]) == 2


def test_several_threads_search_one_corpus(file, tmp_path):
    tool = Search(corpus=str(file), cache=str(tmp_path / "cache"), results=1)
    found: list[str] = []
    queries = ["Seine Paris", "Italy", "lake", "Loire"] * 20
    threads = [threading.Thread(target=lambda q=q: found.append(q + tool.search(q))) for q in queries]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted(q + tool.search(q) for q in queries)


@pytest.mark.parametrize(
    "name, text, why",
    [
        ("a.jsonl", '{"text": "a"}\n{"name": "no text"}\n', "a.jsonl:2 has no text"),
        ("a.jsonl", "{not json\n", "not JSON"),
        ("a.jsonl", "", "contains no passages"),
        ("a.txt", "\n\n \n", "contains no passages"),
        ("a.txt", "the of a", "contains no words"),
        ("a.csv", "x", "neither a .jsonl nor a .txt"),
    ],
)
def test_a_bad_corpus_is_refused(tmp_path, name, text, why):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=why):
        Search(corpus=str(tmp_path / name), cache=str(tmp_path / "cache"))


def test_settings_that_make_no_sense(tmp_path):
    for settings in ({}, {"corpus": "a.txt", "url": "http://a"}):
        with pytest.raises(ValueError, match="either `corpus`, a file, or `url`"):
            Search(**settings)
    with pytest.raises(ValueError, match="cannot read the corpus"):
        Search(corpus=str(tmp_path / "missing.jsonl"))
    with pytest.raises(ValueError, match="http or https address"):
        Search(url="file:///etc/passwd")


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        mode = self.path.strip("/")
        if mode == "slow":
            time.sleep(3)
        if mode == "broken":
            self.send_error(503)
            return
        rows = [{"document": row, "score": 1.0} for row in ROWS[: asked["topk"]]]
        body = {"ok": json.dumps({"result": [rows]}), "other": '{"results": 1}', "noise": "\x00\xff"}.get(mode, "{}")
        self.send_response(200)
        self.end_headers()
        if mode == "drops":
            for _ in range(50):
                try:
                    self.wfile.write(b" ")
                    self.wfile.flush()
                except OSError:  # the client is gone
                    return
                time.sleep(0.1)
        with suppress(OSError):  # the client is gone
            self.wfile.write(body.encode())

    def log_message(self, format, *args):
        pass


@pytest.fixture(scope="module")
def address():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_a_server_answers(address):
    tool = Search(url=f"{address}/ok", results=3)
    assert tool.search("anything").splitlines()[0] == "[1] Paris"
    assert "[3] Zürich" in tool.search("anything") and "[4]" not in tool.search("anything")


@pytest.mark.parametrize(
    "mode, why",
    [
        ("slow", "did not answer within 0.5 s"),
        ("drops", "did not answer within 0.5 s"),
        ("broken", "answered 503"),
        ("other", "an unknown form"),
        ("noise", "an unknown form"),
    ],
)
def test_a_server_that_fails_is_named(address, mode, why):
    error = TimeoutError if "within" in why else SearchError
    with pytest.raises(error, match=f"127.0.0.1 .*{why}"):
        Search(url=f"{address}/{mode}", timeout=0.5).search("a")


def test_a_server_that_is_not_there():
    with pytest.raises(SearchError, match=r"127.0.0.1 cannot be reached \(ConnectionRefusedError\)") as error:
        Search(url="http://127.0.0.1:9/?token=hunter2secret", timeout=1.0).search("a")
    assert "hunter2" not in str(error.value)


def test_a_corpus_in_a_worker(file, tmp_path):
    with Play("spmdrl.env.search:Search", {"corpus": str(file), "cache": str(tmp_path / "cache")}) as play:
        play.open({"prompt": "Which river flows through Paris?"})
        assert play.call("search", query="river Paris").messages[0]["content"].startswith("[1] Paris")
        assert play.call("search", query="").messages[0]["content"] == "ValueError: the query is empty"
