"""Stack traces and other texts of several lines, as programs write them: the lines of each record.

A calm line with a header stands before and behind each of them. The layouts are those of the programs; names
and messages are made up."""

CALM = "2026-11-20 10:00:{:02d},123 INFO [main] shop.Cart: item {} added"
ERROR = "2026-11-20 10:00:30,123 ERROR [main] shop.Cart: payment failed"

# Records without a header, and the level of each.
CRASHES: dict[str, tuple[str, str]] = {
    "go panic": ("critical", """\
panic: runtime error: index out of range [5] with length 3

goroutine 1 [running]:
main.(*Cart).Total(...)
\t/srv/cart/cart.go:7
panic({0x459120?, 0x476600?})
\t/usr/local/go/src/runtime/panic.go:838 +0x207
main.main()
\t/srv/cart/main.go:40 +0x1a
exit status 2"""),
    "go panic with a signal": ("critical", """\
panic: runtime error: invalid memory address or nil pointer dereference
[signal SIGSEGV: segmentation violation code=0x1 addr=0x0 pc=0x4a]

goroutine 34 [running]:
shop/cart.(*Basket[...]).Price(0x0?)
\t/srv/cart/basket.go:7 +0x1d
created by net/http.(*Server).Serve in goroutine 1
\t/usr/local/go/src/net/http/server.go:3086 +0x5cb"""),
    "go deadlock": ("critical", """\
fatal error: all goroutines are asleep - deadlock!

goroutine 1 [chan receive]:
main.main()
\t/srv/cart/main.go:12 +0x2b"""),
    "java main": ("critical", """\
Exception in thread "main" java.lang.IllegalStateException: no cart
\tat shop.Main.main(Main.java:3)
Caused by: java.io.IOException: closed
\tat shop.Store.open(Store.java:9)
\t... 1 more"""),
    "java out of memory": ("error", """\
java.lang.OutOfMemoryError: Java heap space
\tat shop.Cart.grow(Cart.java:77)"""),
    "java virtual machine": ("critical", """\
# A fatal error has been detected by the Java Runtime Environment:
#
#  SIGSEGV (0xb) at pc=0x00007f1c2b3d4e5f, pid=71, tid=72
#"""),
    "python": ("error", """\
Traceback (most recent call last):
  File "/srv/shop.py", line 3, in <module>
    main()
    ~~~~^^
  File "/srv/shop.py", line 1, in main
    raise KeyError("sku")
KeyError: 'sku'"""),
    "python chain": ("error", """\
Traceback (most recent call last):
  File "/srv/shop.py", line 3, in pay
    charge(card)
shop.Refused: no such card

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/srv/shop.py", line 9, in main
    pay(card)
OSError: [Errno 98] Address already in use"""),
    "python interpreter": ("critical", """\
Fatal Python error: Segmentation fault

Current thread 0x00007f1c2b3d4e5f (most recent call first):
  File "/srv/shop.py", line 3 in pay
Segmentation fault (core dumped)"""),
    "rust": ("critical", """\
thread 'main' panicked at src/main.rs:2:5:
called `Option::unwrap()` on a `None` value
stack backtrace:
   0: rust_begin_unwind
             at /rustc/lib.rs:1
note: run with `RUST_BACKTRACE=full` for a verbose backtrace"""),
    "rust of earlier days": ("critical", """\
thread 'worker' panicked at 'no cart', src/main.rs:2:5
note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace"""),
    "node": ("critical", """\
/srv/shop/app.js:12
    throw new Error('no cart');
    ^

Error: no cart
    at pay (/srv/shop/app.js:12:11)
    at node:internal/main/run_main_module:23:47

Node.js v20.11.1"""),
    "node event": ("critical", """\
node:events:497
      throw er; // Unhandled 'error' event
      ^

Error: listen EADDRINUSE: address already in use :::3000
    at Server.setupListenHandle [as _listen2] (node:net:1817:16)
Emitted 'error' event on Server instance at:
    at emitErrorNT (node:net:1796:8) {
  code: 'EADDRINUSE'
}

Node.js v20.11.1"""),
    "dotnet": ("critical", """\
Unhandled exception. System.InvalidOperationException: no cart
   at Shop.Cart.Pay() in /src/Cart.cs:line 12
   at Shop.Program.Main() in /src/Program.cs:line 3"""),
    "php": ("critical", """\
PHP Fatal error:  Uncaught Error: no cart in /srv/a.php:7
Stack trace:
#0 /srv/b.php(3): pay()
#1 {main}
  thrown in /srv/a.php on line 7"""),
    "ruby": ("critical", """\
/srv/shop.rb:3:in `pay': card refused (RuntimeError)
\tfrom /srv/shop.rb:9:in `<main>'"""),
    "c++": ("critical", """\
terminate called after throwing an instance of 'std::runtime_error'
  what():  no cart
Aborted (core dumped)"""),
    "assertion": ("critical", """\
shop: cart.c:12: total: Assertion `n > 0' failed.
Aborted"""),
    "segmentation fault": ("critical", "Segmentation fault (core dumped)"),
    "killed": ("critical", "Killed"),
    "shell": ("critical", "./run.sh: line 3:   812 Segmentation fault      (core dumped) ./shop"),
    "elixir": ("critical", """\
** (RuntimeError) no cart
    (shop 0.1.0) lib/shop.ex:7: Shop.pay/1"""),
    "a program's own error": ("error", "nginx: [emerg] bind() to 0.0.0.0:80 failed (98: Address already in use)"),
    "a start that failed": ("error", "Error: Could not find or load main class shop.Main"),
    "a sentence of the system": ("error", "cat: /etc/shop.conf: No such file or directory"),
}  # fmt: skip

# Below a header.
BELOW: dict[str, str] = {
    "java": """\
java.lang.IllegalStateException: no cart
\tat shop.Cart.pay(Cart.java:12)
\tSuppressed: java.io.IOException: closed
\t\tat shop.Store.close(Store.java:9)
Caused by: java.io.IOException: closed
... 2 common frames omitted""",
    "java without indentation": """\
java.lang.IllegalStateException: no cart
at shop.Cart.pay(Cart.java:12)
at java.base/java.lang.Thread.run(Thread.java:833)""",
    "python": """\
Traceback (most recent call last):
  File "/srv/shop.py", line 3, in pay
    charge(card)
sqlalchemy.exc.OperationalError: (psycopg2.OperationalError) could not connect
[SQL: SELECT 1]
(Background on this error at: https://sqlalche.me/e/20/e3q8)""",
    "go": """\
goroutine 19 [running]:
net/http.(*conn).serve.func1(0xc000010000)
\t/usr/local/go/src/net/http/server.go:1801 +0x147
panic({0x459120, 0xc0000140a8})
\t/usr/local/go/src/runtime/panic.go:884 +0x212
main.pay(0x1, 0x2)
\t/srv/shop/main.go:12 +0x1d
created by main.start
\t/srv/shop/main.go:9 +0x5c""",
    "zap": """\
go.opentelemetry.io/collector/exporter/internal.NewQueueSender.func3
\tgo.opentelemetry.io/collector/exporter@v0.120.0/internal/queue_sender.go:128
main.main
\t/srv/shop/main.go:9
runtime.main
\t/usr/local/go/src/runtime/proc.go:250""",
    "dotnet": """\
System.AggregateException: One or more errors occurred. (no peer)
 ---> System.Net.Http.HttpRequestException: no peer
   at Shop.Sync.Call() in /src/Sync.cs:line 20
   --- End of inner exception stack trace ---
---> (Inner Exception #0) System.Net.Http.HttpRequestException: no peer
   at Shop.Sync.Call() in /src/Sync.cs:line 20<---
""",
    "php": """\
[stacktrace]
#0 /srv/shop/Handle.php(255): handleError(2)
#1 {main}
"}""",
    "rails": """\
ActionView::Template::Error (undefined method `total' for nil):
    12: <p>

app/views/carts/show.html.erb:12:in `show'
app/controllers/carts_controller.rb:7:in `show'""",
    "json": '{\n  "id": 7\n}',
}  # fmt: skip
