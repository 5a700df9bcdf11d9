package idempotent_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib"
	_ "modernc.org/sqlite"

	"github.com/seed-5e04d8fb/jetbox/dedup"
	"github.com/seed-5e04d8fb/jetbox/dedup/idempotent"
	"github.com/seed-5e04d8fb/jetbox/internal/pgtest"
)

func TestMain(m *testing.M) { os.Exit(pgtest.Main(m)) }

func openSQLite(t *testing.T) *sql.DB {
	t.Helper()
	return open(t, "sqlite", "file:"+filepath.Join(t.TempDir(), "app.db")+"?_pragma=journal_mode(wal)&_pragma=busy_timeout(5000)")
}

func open(t *testing.T, driver, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open(driver, dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	if _, err := db.Exec(`CREATE TABLE effects (name TEXT NOT NULL)`); err != nil {
		t.Fatal(err)
	}
	return db
}

// onEachDatabase runs f with an empty SQLite file and PostgreSQL database.
func onEachDatabase(t *testing.T, f func(t *testing.T, db *sql.DB, d idempotent.Dialect)) {
	t.Helper()
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		f(t, openSQLite(t), idempotent.SQLite)
	})
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		f(t, open(t, "pgx", pgtest.URL(t)), idempotent.Postgres)
	})
}

func newMiddleware(t *testing.T, db *sql.DB, d idempotent.Dialect, cfg idempotent.Config) *idempotent.Middleware {
	t.Helper()
	m, err := idempotent.New(t.Context(), db, d, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// effect is a handler's write, in the transaction of the answer.
func effect(r *http.Request, name string) error {
	tx, err := idempotent.Tx(r.Context())
	if err != nil {
		return err
	}
	_, err = tx.ExecContext(r.Context(), `INSERT INTO effects VALUES ($1)`, name)
	return err
}

func effects(t *testing.T, db *sql.DB, name string) (n int) {
	t.Helper()
	if err := db.QueryRow(`SELECT count(*) FROM effects WHERE name = $1`, name).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

func post(h http.Handler, path, key, body string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(http.MethodPost, path, strings.NewReader(body))
	if key != "" {
		r.Header.Set("Idempotency-Key", key)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

func want(t *testing.T, what string, w *httptest.ResponseRecorder, status int, body string) {
	t.Helper()
	if w.Code != status || !strings.Contains(w.Body.String(), body) {
		t.Errorf("%s: %d %q, want %d with %q", what, w.Code, w.Body, status, body)
	}
}

func TestSameRequestIsAnsweredOnce(t *testing.T) {
	t.Parallel()
	onEachDatabase(t, func(t *testing.T, db *sql.DB, d idempotent.Dialect) {
		runs := 0
		h := newMiddleware(t, db, d, idempotent.Config{}).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			runs++
			body, err := io.ReadAll(r.Body)
			if err = errors.Join(err, effect(r, string(body))); err != nil {
				t.Error(err)
			}
			w.Header().Set("Location", "/orders/7")
			w.Header().Add("X-Many", "1")
			w.Header().Add("X-Many", "\xff")
			w.Header().Set("Set-Cookie", "session=1")
			w.Header().Set("Connection", "X-Hop")
			w.Header().Set("X-Hop", "1")
			w.WriteHeader(http.StatusCreated)
			w.Header().Set("X-Late", "1")
			fmt.Fprintf(w, "order %s \x00\xff, run %d", body, runs)
		}))
		first := post(h, "/orders", "k1", "a")
		want(t, "first", first, http.StatusCreated, "order a \x00\xff, run 1")
		for range 2 {
			again := post(h, "/orders", `"k1"`, "a")
			want(t, "again", again, http.StatusCreated, first.Body.String())
			for name, value := range map[string]string{
				"Location": "[/orders/7]", "X-Many": "[1 \xff]", "Idempotency-Replayed": "[true]", "Set-Cookie": "[]", "X-Hop": "[]", "X-Late": "[]",
			} {
				if got := fmt.Sprint(again.Header()[name]); got != value {
					t.Errorf("again: %s is %q, want %q", name, got, value)
				}
			}
		}
		if first.Header().Get("Set-Cookie") == "" || first.Header().Get("Idempotency-Replayed") != "" {
			t.Errorf("first: headers %v, want the cookie and no mark", first.Header())
		}
		want(t, "another body", post(h, "/orders", "k1", "b"), http.StatusUnprocessableEntity, "already used")
		want(t, "another query", post(h, "/orders?x=1", "k1", "a"), http.StatusUnprocessableEntity, "already used")
		want(t, "another path", post(h, "/bills", "k1", "a"), http.StatusCreated, "run 2")
		want(t, "another key", post(h, "/orders", "k2", "a"), http.StatusCreated, "run 3")
		want(t, "no key", post(h, "/orders", "", "free"), http.StatusCreated, "run 4")
		want(t, "no key again", post(h, "/orders", "", "free"), http.StatusCreated, "run 5")
		if a, free := effects(t, db, "a"), effects(t, db, "free"); a != 3 || free != 2 {
			t.Errorf("effects: %d of a and %d without a key, want 3 and 2", a, free)
		}
	})
}

func says(status int) func(http.ResponseWriter) {
	return func(w http.ResponseWriter) { w.WriteHeader(status) }
}

// What asks to be sent again is not kept, and its effect is undone.
func TestAnswerThatAsksForARepeatIsNotKept(t *testing.T) {
	t.Parallel()
	onEachDatabase(t, func(t *testing.T, db *sql.DB, d idempotent.Dialect) {
		var fail func(w http.ResponseWriter)
		h := newMiddleware(t, db, d, idempotent.Config{MaxAnswer: 100}).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if err := effect(r, "e"); err != nil {
				t.Error(err)
			}
			if fail != nil {
				fail(w)
			}
		}))
		call := func(key string) (w *httptest.ResponseRecorder) {
			defer func() {
				if p := recover(); p != nil {
					w = &httptest.ResponseRecorder{Code: 599}
				}
			}()
			return post(h, "/", key, "")
		}
		for _, tt := range []struct {
			name string
			fail func(w http.ResponseWriter)
			want int
		}{
			{"500", says(500), 500},
			{"503", says(503), 503},
			{"429", says(429), 429},
			{"panic", func(http.ResponseWriter) { panic("boom") }, 599},
			{"abort", func(http.ResponseWriter) { panic(http.ErrAbortHandler) }, 599},
			{"too large", func(w http.ResponseWriter) { _, _ = w.Write(make([]byte, 101)) }, 500},
		} {
			before := effects(t, db, "e")
			fail = tt.fail
			if w := call(tt.name); w.Code != tt.want {
				t.Errorf("%s: %d, want %d", tt.name, w.Code, tt.want)
			}
			if n := effects(t, db, "e"); n != before {
				t.Errorf("%s left %d effects", tt.name, n-before)
			}
			fail = nil
			want(t, tt.name+", then well", call(tt.name), 200, "")
			if n := effects(t, db, "e"); n != before+1 {
				t.Errorf("%s, then well: %d effects, want 1", tt.name, n-before)
			}
		}
		// Others are kept.
		fail = says(404)
		want(t, "404", call("404"), 404, "")
		fail = nil
		want(t, "404 again", call("404"), 404, "")
	})
}

// Sixteen at once: one runs, the others are told to come again, and then have its
// answer.
func TestConcurrentRequestsHaveOneEffect(t *testing.T) {
	t.Parallel()
	onEachDatabase(t, func(t *testing.T, db *sql.DB, d idempotent.Dialect) {
		inside, end := make(chan struct{}, 16), make(chan struct{})
		h := newMiddleware(t, db, d, idempotent.Config{}).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if err := effect(r, "e"); err != nil {
				t.Error(err)
			}
			inside <- struct{}{}
			<-end
			_, _ = io.WriteString(w, "done")
		}))
		var wg sync.WaitGroup
		wg.Go(func() { want(t, "first", post(h, "/", "k", ""), 200, "done") })
		<-inside
		var conflicts atomic.Int64
		var others sync.WaitGroup
		for range 15 {
			others.Go(func() {
				w := post(h, "/", "k", "")
				if w.Code == http.StatusConflict && w.Header().Get("Retry-After") != "" {
					conflicts.Add(1)
				}
			})
		}
		others.Wait()
		want(t, "another body meanwhile", post(h, "/", "k", "x"), http.StatusUnprocessableEntity, "")
		close(end)
		wg.Wait()
		if n := conflicts.Load(); n != 15 {
			t.Errorf("%d conflicts with Retry-After, want 15", n)
		}
		want(t, "after it", post(h, "/", "k", ""), 200, "done")
		if n := effects(t, db, "e"); n != 1 {
			t.Errorf("%d effects, want 1", n)
		}
	})
}

func TestBadRequestsAreRefused(t *testing.T) {
	t.Parallel()
	db := openSQLite(t)
	h := newMiddleware(t, db, idempotent.SQLite, idempotent.Config{RequireKey: true, MaxBody: 10}).
		Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, r.Method) }))
	want(t, "no key", post(h, "/", "", ""), 400, `"Idempotency-Key is missing"`)
	for _, key := range []string{" ", `"`, `""`, `"a`, `"a"b`, `"a\b"`, "\"\x7f\"", "a\x00", "\xff", strings.Repeat("x", 513), "a\tb"} {
		want(t, fmt.Sprintf("key %.20q", key), post(h, "/", key, ""), 400, `"Idempotency-Key is malformed"`)
	}
	for _, key := range []string{"a", `"a"; p=1`, `"\"\\"`, "é 1", strings.Repeat("x", 512), `a"b`} {
		want(t, fmt.Sprintf("key %.20q", key), post(h, "/", key, ""), 200, "POST")
	}
	r := httptest.NewRequest(http.MethodPost, "/", nil)
	r.Header["Idempotency-Key"] = []string{"a", "b"}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	want(t, "two keys", w, 400, "2 times")
	if ct := w.Header().Get("Content-Type"); ct != "application/problem+json" {
		t.Errorf("Content-Type is %q", ct)
	}
	want(t, "long body", post(h, "/", "long", strings.Repeat("x", 11)), http.StatusRequestEntityTooLarge, "10 bytes")
	want(t, "longest body", post(h, "/", "long", strings.Repeat("x", 10)), 200, "")
	for _, method := range []string{http.MethodGet, http.MethodDelete, http.MethodPut} {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(method, "/", nil))
		want(t, method+" without a key", w, 200, method)
	}
}

func TestCallersDoNotShareKeys(t *testing.T) {
	t.Parallel()
	h := newMiddleware(t, openSQLite(t), idempotent.SQLite, idempotent.Config{
		CallerFunc: func(r *http.Request) string { return r.Header.Get("X-Account") },
	}).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, r.Header.Get("X-Account")) }))
	for _, account := range []string{"ann", "bob", "ann"} {
		r := httptest.NewRequest(http.MethodPost, "/", nil)
		r.Header.Set("Idempotency-Key", "k")
		r.Header.Set("X-Account", account)
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		want(t, account, w, 200, account)
	}
}

// A request that hangs loses its key when its time is up: another takes over, and
// the late one is undone and says so. So it is when its process has died.
func TestHungRequestLosesItsKey(t *testing.T) {
	// Not parallel: on a fake clock.
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		db := open(t, "sqlite", "file:"+filepath.Join(dir, "app.db")+"?_pragma=journal_mode(wal)&_pragma=busy_timeout(5000)")
		m := newMiddleware(t, db, idempotent.SQLite, idempotent.Config{MaxTime: time.Minute, Retention: time.Hour})
		for name, write := range map[string]func(r *http.Request) error{
			"in the transaction": func(r *http.Request) error { return effect(r, "late") },
			"elsewhere":          func(*http.Request) error { return nil },
		} {
			hang, end := true, make(chan struct{})
			h := m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if hang {
					if err := write(r); err != nil {
						t.Error(err)
					}
					<-end
				} else if err := effect(r, "well"); err != nil {
					t.Error(err)
				}
				_, _ = io.WriteString(w, "done")
			}))
			late := make(chan *httptest.ResponseRecorder, 1)
			go func() { late <- post(h, "/"+name[:2], name, "") }()
			synctest.Wait()
			hang = false
			time.Sleep(70 * time.Second)
			want(t, name+", while it may be settling", post(h, "/"+name[:2], name, ""), http.StatusConflict, "")
			time.Sleep(6 * time.Second)
			want(t, name+", taken over", post(h, "/"+name[:2], name, ""), 200, "done")
			close(end)
			if w := <-late; w.Code != http.StatusConflict && w.Code != http.StatusServiceUnavailable {
				t.Errorf("%s: the late one: %d %q, want 409 or 503", name, w.Code, w.Body)
			}
			want(t, name+", afterwards", post(h, "/"+name[:2], name, ""), 200, "done")
		}
		if late, well := effects(t, db, "late"), effects(t, db, "well"); late != 0 || well != 2 {
			t.Errorf("effects: %d late and %d of those that took over, want 0 and 2", late, well)
		}

		// The answer is given again for the retention, and its row goes then.
		h := m.Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			if err := effect(r, "kept"); err != nil {
				t.Error(err)
			}
		}))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		for _, wait := range []time.Duration{0, 59 * time.Minute, time.Minute} {
			time.Sleep(wait)
			want(t, "within and after the retention", post(h, "/", "kept", ""), 200, "")
		}
		if n := effects(t, db, "kept"); n != 2 {
			t.Errorf("%d effects, want one before and one after the retention", n)
		}
		go func() { done <- m.Run(ctx) }()
		time.Sleep(62 * time.Minute)
		synctest.Wait()
		var rows int
		if err := db.QueryRow(`SELECT count(*) FROM jetbox_idempotency`).Scan(&rows); err != nil || rows != 0 {
			t.Errorf("%d rows, %v, want none", rows, err)
		}
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
}

// Processes that share a PostgreSQL server may have clocks that differ by more than a
// request's time: the server's decides, which the test sets ahead.
func TestClockOfTheServerDecides(t *testing.T) {
	t.Parallel()
	// Its functions are found before the server's own.
	url := pgtest.URL(t)
	admin := open(t, "pgx", url)
	for _, stmt := range []string{
		`CREATE SCHEMA app`,
		`CREATE TABLE app.ahead (by INTERVAL NOT NULL)`,
		`INSERT INTO app.ahead VALUES ('0')`,
		`CREATE FUNCTION app.statement_timestamp() RETURNS timestamptz LANGUAGE sql STABLE AS 'SELECT pg_catalog.statement_timestamp() + by FROM app.ahead'`,
	} {
		if _, err := admin.Exec(stmt); err != nil {
			t.Fatal(err)
		}
	}
	advance := func(by time.Duration) {
		t.Helper()
		if _, err := admin.Exec(`UPDATE app.ahead SET by = by + $1::text::interval`, by.String()); err != nil {
			t.Fatal(err)
		}
	}
	db := open(t, "pgx", url+"&search_path=app,pg_catalog")
	m := newMiddleware(t, db, idempotent.Postgres, idempotent.Config{MaxTime: time.Minute, Retention: time.Hour})
	inside, end := make(chan struct{}), make(chan struct{})
	first := true
	h := m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if first {
			first = false
			inside <- struct{}{}
			<-end
		}
		if err := effect(r, "e"); err != nil {
			w.WriteHeader(http.StatusInternalServerError)
		}
	}))
	late := make(chan *httptest.ResponseRecorder, 1)
	go func() { late <- post(h, "/", "k", "") }()
	<-inside
	advance(70 * time.Second)
	want(t, "while it may be settling", post(h, "/", "k", ""), http.StatusConflict, "")
	advance(6 * time.Second)
	want(t, "taken over", post(h, "/", "k", ""), http.StatusOK, "")
	close(end)
	want(t, "the late one", <-late, http.StatusInternalServerError, "")
	advance(59 * time.Minute)
	want(t, "within the retention", post(h, "/", "k", ""), http.StatusOK, "")
	if n := effects(t, db, "e"); n != 1 {
		t.Errorf("%d effects within the retention, want 1", n)
	}
	advance(time.Minute)
	want(t, "after it", post(h, "/", "k", ""), http.StatusOK, "")
	if n := effects(t, db, "e"); n != 2 {
		t.Errorf("%d effects after the retention, want 2", n)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	advance(61 * time.Minute)
	go func() { done <- m.Run(ctx) }()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		var rows int
		if err := db.QueryRow(`SELECT count(*) FROM jetbox_idempotency`).Scan(&rows); err != nil {
			t.Fatal(err)
		}
		if rows == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d rows after the retention, want none", rows)
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Errorf("Run: %v", err)
	}
}

// What only the commit finds wrong is undone, and the key is free at once.
func TestCommitThatFailsFreesTheKey(t *testing.T) {
	t.Parallel()
	onEachDatabase(t, func(t *testing.T, db *sql.DB, d idempotent.Dialect) {
		if d == idempotent.SQLite {
			db.SetMaxOpenConns(1) // the one with the pragma
			if _, err := db.Exec(`PRAGMA foreign_keys = on`); err != nil {
				t.Fatal(err)
			}
		}
		for _, stmt := range []string{
			`CREATE TABLE parents (id INTEGER PRIMARY KEY)`,
			`CREATE TABLE children (parent INTEGER REFERENCES parents (id) DEFERRABLE INITIALLY DEFERRED)`,
		} {
			if _, err := db.Exec(stmt); err != nil {
				t.Fatal(err)
			}
		}
		parents := false
		h := newMiddleware(t, db, d, idempotent.Config{}).Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			if err := effect(r, "e"); err != nil {
				t.Error(err)
			}
			tx, err := idempotent.Tx(r.Context())
			if err != nil {
				t.Error(err)
				return
			}
			if _, err := tx.Exec(`INSERT INTO children VALUES (1)`); err != nil {
				t.Error(err)
			}
			if parents {
				if _, err := tx.Exec(`INSERT INTO parents VALUES (1)`); err != nil {
					t.Error(err)
				}
			}
		}))
		want(t, "violating", post(h, "/", "k", ""), http.StatusServiceUnavailable, "")
		parents = true
		want(t, "then well", post(h, "/", "k", ""), 200, "")
		if n := effects(t, db, "e"); n != 1 {
			t.Errorf("%d effects, want 1", n)
		}
	})
}

// The client hangs up; what its handler finishes all the same is kept for the
// next time.
func TestAnswerIsKeptForAClientThatHungUp(t *testing.T) {
	t.Parallel()
	onEachDatabase(t, func(t *testing.T, db *sql.DB, d idempotent.Dialect) {
		ctx, cancel := context.WithCancel(t.Context())
		h := newMiddleware(t, db, d, idempotent.Config{}).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if err := effect(r, "e"); err != nil {
				t.Error(err)
			}
			cancel()
			_, _ = io.WriteString(w, "done")
		}))
		r := httptest.NewRequestWithContext(ctx, http.MethodPost, "/", nil)
		r.Header.Set("Idempotency-Key", "k")
		h.ServeHTTP(httptest.NewRecorder(), r)
		want(t, "again", post(h, "/", "k", ""), 200, "done")
		if n := effects(t, db, "e"); n != 1 {
			t.Errorf("%d effects, want 1", n)
		}
	})
}

func TestDatabaseThatFailsIs503(t *testing.T) {
	t.Parallel()
	db := openSQLite(t)
	h := newMiddleware(t, db, idempotent.SQLite, idempotent.Config{}).Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		db.Close()
	}))
	for _, what := range []string{"while it runs", "before it runs"} {
		w := post(h, "/", "k", "")
		want(t, what, w, http.StatusServiceUnavailable, "same key")
		if w.Header().Get("Retry-After") == "" {
			t.Errorf("%s: no Retry-After", what)
		}
	}
	if _, err := idempotent.Tx(t.Context()); !errors.Is(err, idempotent.ErrNoMiddleware) {
		t.Errorf("Tx outside a request: %v, want ErrNoMiddleware", err)
	}
}

func TestTablesAreMadeOnceAndRefusedWhenNewer(t *testing.T) {
	t.Parallel()
	onEachDatabase(t, func(t *testing.T, db *sql.DB, d idempotent.Dialect) {
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				if _, err := idempotent.New(t.Context(), db, d, idempotent.Config{}); err != nil {
					t.Errorf("New: %v", err)
				}
			})
		}
		wg.Wait()
		if _, err := db.Exec(`INSERT INTO jetbox_idempotency_schema VALUES (7, 0)`); err != nil {
			t.Fatal(err)
		}
		if _, err := idempotent.New(t.Context(), db, d, idempotent.Config{}); !errors.Is(err, dedup.ErrSchemaTooNew) {
			t.Errorf("New: %v, want ErrSchemaTooNew", err)
		}
	})
}

func TestBadConfigIsRefusedByName(t *testing.T) {
	t.Parallel()
	db := openSQLite(t)
	for _, tt := range []struct {
		db   *sql.DB
		d    idempotent.Dialect
		cfg  idempotent.Config
		want string
	}{
		{nil, idempotent.SQLite, idempotent.Config{}, "database"},
		{db, 0, idempotent.Config{}, "Dialect"},
		{db, idempotent.SQLite, idempotent.Config{Table: "a.b"}, "Table"},
		{db, idempotent.Postgres, idempotent.Config{Table: "a.b.c"}, "Table"},
		{db, idempotent.SQLite, idempotent.Config{Retention: -1}, "Retention"},
		{db, idempotent.SQLite, idempotent.Config{Retention: time.Minute}, "Retention"},
		{db, idempotent.SQLite, idempotent.Config{MaxBody: -1}, "MaxBody"},
		{db, idempotent.SQLite, idempotent.Config{MaxAnswer: -1}, "MaxAnswer"},
		{db, idempotent.SQLite, idempotent.Config{MaxTime: -1}, "MaxTime"},
	} {
		if _, err := idempotent.New(t.Context(), tt.db, tt.d, tt.cfg); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("New(%+v): %v, want an error naming %s", tt.cfg, err, tt.want)
		}
	}
}
