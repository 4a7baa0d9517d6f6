import pytest
pytest_plugins = ["helpers.servers"]
from d9d_ckpt.storage.opening import store_for

@pytest.mark.parametrize("server", ["rclone","moto"], indirect=True)
def test_x(server):
    s = store_for(server.url, {})
    print(s.claim(server.url+"/c", b"x"), s.claim(server.url+"/c", b"y"), server.get("c"))
    u = s.upload(server.url+"/m"); u.put(1,0,memoryview(bytes(6<<20))); u.put(2,6<<20,memoryview(b"abc")); 
    try: print(server.uploads())
    except Exception as e: print(e)
    u.complete()
    print(len(server.get("m")), s.names(server.url), s.files(server.url))
    for what in (lambda: s.size(server.url+"/no"), lambda: s.names("s3://nobucket/x"), lambda: s.put("s3://nobucket/x", b""), lambda: s.upload("s3://nobucket/x"), lambda: s.read(server.url+"/m", 6<<20, 10), lambda: s.read(server.url+"/m", 60<<20, 10)):
        try: print(what())
        except Exception as e: print(type(e), e)

def test_stub(stub):
    s = store_for(stub.seen.url, {})
    url = stub.seen.url
    print(s.claim(url+"/c", b"x"), s.claim(url+"/c", b"y"))
    u = s.upload(url+"/m"); u.put(1,0,memoryview(bytes(6<<20))); u.put(2,6<<20,memoryview(b"abc")); 
    print(stub.seen.uploads()); u.complete(); print(len(s.read(url+"/m", 0, (6<<20)+3)), s.names(url), s.files(url))
    stub.page = 1
    print(s.names(url), stub.seen.objects().keys())
