package outboxtest

func concurrentScenarios() []scenario { return nil }
func modelScenarios() []scenario      { return nil }
