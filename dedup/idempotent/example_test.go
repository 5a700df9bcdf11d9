package idempotent_test

import (
	"context"
	"database/sql"
	"fmt"
	"net/http"

	"github.com/seed-5e04d8fb/jetbox/dedup/idempotent"
)

// A payment that is sent twice is booked once, and both times the answer is the
// same.
func Example() {
	db, err := sql.Open("sqlite", ":memory:")
	if err != nil {
		panic(err)
	}
	defer db.Close()
	db.SetMaxOpenConns(1) // in memory, each connection is a database of its own
	if _, err := db.Exec(`CREATE TABLE payments (id INTEGER PRIMARY KEY, what TEXT)`); err != nil {
		panic(err)
	}
	m, err := idempotent.New(context.Background(), db, idempotent.SQLite, idempotent.Config{RequireKey: true})
	if err != nil {
		panic(err)
	}
	pay := m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		tx, err := idempotent.Tx(r.Context())
		if err != nil {
			http.Error(w, "try again", http.StatusServiceUnavailable)
			return
		}
		res, err := tx.ExecContext(r.Context(), `INSERT INTO payments (what) VALUES (?)`, r.FormValue("what"))
		if err != nil {
			http.Error(w, "try again", http.StatusServiceUnavailable)
			return
		}
		id, _ := res.LastInsertId()
		w.WriteHeader(http.StatusCreated)
		fmt.Fprintf(w, "payment %d", id)
	}))
	for range 2 {
		answer := post(pay, "/payments?what=rent", "7f2b", "")
		fmt.Println(answer.Code, answer.Body)
	}
	// Output:
	// 201 payment 1
	// 201 payment 1
}
