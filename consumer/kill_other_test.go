//go:build !unix

package consumer_test

func stopSelf() {}
