import time, os
from tests.server.test_faults import overload
if __name__=="__main__":
    c=time.process_time(); w=time.time()
    print(overload(6)); print("cpu", time.process_time()-c, "wall", time.time()-w)
